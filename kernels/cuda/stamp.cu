/* stamp: stamps[index] = the global timer, in nanoseconds, between two nodes of a graph that is being timed
 * Buffers   stamps [..] u64
 * Scalars   index                                    Launch    one thread
 * Capture   no allocation, sync or readback; never launched with a programmatic edge, so everything before has ended
 * Reference none: it only tells the time */
KERNEL void stamp(u64* stamps, u32 index) { stamps[index] = global_time_ns(); }
