//! The peer-to-peer exchange, done by the host: the same scratch, epochs, flags, lines and status words as kernels/cuda/exchange.cu, with one block.
//!
//! So a test that writes partials sees whether addresses, pieces and parities are right on every rank. Every range that the kernel may
//! touch is checked against the live allocations.

use crate::state::state;
use slotgraph_kernels::ops::exchange::{BLOCKS, LINE_ROWS, PEERS_MAX, PIECE_ROWS, Scratch, status};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// One launch with these parameters, in rows of `hidden` floats.
pub fn run(values: &[Box<[u8]>], hidden: usize) {
    let address =
        |at: usize| u64::from_le_bytes(values[at][..].try_into().expect("a pointer has eight bytes")) as usize;
    let number = |at: usize| u32::from_le_bytes(values[at][..].try_into().expect("a number has four bytes")) as usize;
    let (gathered, partial, own) = (address(0), address(1), address(2));
    let peers: Vec<usize> = (3..3 + PEERS_MAX).map(address).take_while(|&peer| peer != 0).collect();
    let status_page = address(3 + PEERS_MAX);
    let [rank, rows, first, count] = [4, 5, 6, 7].map(|at| number(at + PEERS_MAX));
    let layout = Scratch { ranks: peers.len(), hidden };
    assert!(
        count <= PIECE_ROWS && first + count <= rows && peers[rank] == own,
        "a piece of the step, and this rank's scratch"
    );
    let row = 4 * hidden;
    let within = |what: &str, base: usize, bytes: usize| {
        assert!(state().kind_of(base, bytes).is_some(), "{what} holds no {bytes} bytes");
    };
    within("partial", partial, rows * row);
    within("gathered", gathered, peers.len() * rows * row);
    within("the status page", status_page, 4 * status::WORDS);
    peers.iter().for_each(|&peer| within("a peer's scratch", peer, layout.bytes()));

    // SAFETY: words of live, zeroed, aligned allocations, as just checked; every access of another thread is atomic as well.
    let word = |base: usize, bytes: usize| unsafe { AtomicU32::from_ptr((base + bytes) as *mut u32) };
    let status_word = |at: usize| word(status_page, 4 * at);
    let epoch = word(own, Scratch::EPOCHS_AT).load(Ordering::Relaxed) + 1;
    // What a wait for rank `peer` may do when it sees no more than `seen`: go on, or end.
    let gives_up = |peer: usize, seen: u32, began: Instant| {
        if word(own, Scratch::FAILED_AT).load(Ordering::Relaxed) != 0 {
            return true;
        }
        let limit = Duration::from_millis(u64::from(status_word(status::LIMIT_MS).load(Ordering::Relaxed)));
        let told = status_word(status::STOP).load(Ordering::Acquire) != 0;
        if !told && began.elapsed() <= limit {
            std::thread::yield_now();
            return false;
        }
        word(own, Scratch::FAILED_AT).store(1, Ordering::Relaxed);
        for (at, value) in [
            (status::RANK, rank as u32),
            (status::PEER, peer as u32),
            (status::WANTED, epoch),
            (status::SEEN, seen),
            (status::ROWS, rows as u32),
        ] {
            status_word(at).store(value, Ordering::Relaxed);
        }
        let code = if told { status::STOPPED } else { status::TIMEOUT };
        status_word(status::CODE).store(code, Ordering::Release);
        true
    };
    if rows <= LINE_ROWS {
        let half = |base: usize, from: usize| {
            base + layout.lines_at() + ((epoch as usize % 2) * peers.len() + from) * layout.lines_bytes()
        };
        // SAFETY: as above, of eight bytes.
        let line = |base: usize, at: usize| unsafe { AtomicU64::from_ptr((base + 8 * at) as *mut u64) };
        for at in 0..count * hidden {
            let value = word(partial, first * row + 4 * at).load(Ordering::Relaxed);
            for &peer in &peers {
                line(half(peer, rank), at).store(u64::from(value) | u64::from(epoch) << 32, Ordering::Relaxed);
            }
        }
        for from in 0..peers.len() {
            for at in 0..count * hidden {
                let began = Instant::now();
                let value = loop {
                    let pair = line(half(own, from), at).load(Ordering::Relaxed);
                    let seen = (pair >> 32) as u32;
                    if seen == epoch || gives_up(from, seen, began) {
                        break pair as u32;
                    }
                };
                word(gathered, (from * rows + first) * row + 4 * at).store(value, Ordering::Relaxed);
            }
        }
    } else {
        let place = |base: usize, from: usize| {
            base + Scratch::DATA_AT + ((epoch as usize % 2) * peers.len() + from) * layout.piece_bytes()
        };
        for &peer in &peers {
            // SAFETY: both ranges lie in allocations checked above and do not overlap; the protocol keeps readers away from this half.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    (partial + first * row) as *const u8,
                    place(peer, rank) as *mut u8,
                    count * row,
                )
            };
            word(peer, 4 * rank).store(epoch, Ordering::Release);
        }
        for peer in (0..peers.len()).filter(|&peer| peer != rank) {
            let began = Instant::now();
            loop {
                let seen = word(own, 4 * peer).load(Ordering::Acquire);
                if seen.wrapping_sub(epoch) as i32 >= 0 || gives_up(peer, seen, began) {
                    break;
                }
            }
        }
        for from in 0..peers.len() {
            let target = gathered + (from * rows + first) * row;
            // SAFETY: as above; the flags said that this half is whole.
            unsafe { std::ptr::copy_nonoverlapping(place(own, from) as *const u8, target as *mut u8, count * row) };
        }
    }
    for block in 0..BLOCKS {
        word(own, Scratch::EPOCHS_AT + 4 * block).store(epoch, Ordering::Relaxed);
    }
}
