//! Geometry of the peer-to-peer exchange, which combines on the way. The other transports launch nothing of ours but the combine behind them.

use super::gemm::stride;
use super::{Arg, Kernel, Launch, LaunchError, define};
use crate::Specs;
use crate::ops::exchange::{BLOCKS, LINE_ROWS, PEERS_MAX, PIECE_ROWS, Scratch, status};
use crate::ops::{Exchange, MoeCombine};

/// Threads of a block. Blocks of this size find a place beside any other kernel's, so ranks that share a GPU can meet.
const THREADS: usize = 512;

impl Exchange {
    /// One launch a piece of rows, which also does what `combine` says.
    pub(super) fn launches(&self, combine: &MoeCombine, specs: &dyn Specs) -> Result<Vec<Launch>, LaunchError> {
        let (rows, hidden) = (specs.rows(), stride(specs, self.partial));
        if !hidden.is_multiple_of(4) {
            let need = "a multiple of 4".into();
            return Err(LaunchError::Shape { op: "exchange", what: "the hidden width", got: hidden, need });
        }
        let scratch = Scratch { ranks: self.ranks, hidden };
        let defines = vec![
            define("HIDDEN", hidden),
            define("RANKS", self.ranks),
            define("PEERS_MAX", PEERS_MAX),
            define("BLOCKS", BLOCKS),
            define("THREADS", THREADS),
            define("EPOCHS_AT", Scratch::EPOCHS_AT),
            define("FAILED_AT", Scratch::FAILED_AT),
            define("DATA_AT", Scratch::DATA_AT),
            define("PIECE_BYTES", scratch.piece_bytes()),
            define("LINES", usize::from(rows <= LINE_ROWS)),
            define("LINES_AT", scratch.lines_at()),
            define("LINES_BYTES", scratch.lines_bytes()),
            define("STATUS_CODE", status::CODE),
            define("STATUS_RANK", status::RANK),
            define("STATUS_PEER", status::PEER),
            define("STATUS_WANTED", status::WANTED),
            define("STATUS_SEEN", status::SEEN),
            define("STATUS_ROWS", status::ROWS),
            define("STATUS_STOP", status::STOP),
            define("STATUS_LIMIT_MS", status::LIMIT_MS),
            define("STATUS_TIMEOUT", status::TIMEOUT as usize),
            define("STATUS_STOPPED", status::STOPPED as usize),
        ];
        let kernel = Kernel { source: "exchange.cu", function: "exchange", defines };
        let piece = |first: usize| {
            let mut args = vec![Arg::Buffer(self.gathered), Arg::Buffer(self.partial), Arg::Peer(self.rank as u8)];
            args.extend((0..PEERS_MAX).map(|peer| if peer < self.ranks { Arg::Peer(peer as u8) } else { Arg::U64(0) }));
            args.push(Arg::Status);
            args.extend([self.rank, rows, first, (rows - first).min(PIECE_ROWS)].map(|number| Arg::U32(number as u32)));
            args.extend([combine.x, combine.shared].map(Arg::Buffer));
            let (kernel, block) = (kernel.clone(), THREADS as u32);
            Launch { kernel, grid: [BLOCKS as u32, 1, 1], block, args, ..Launch::plain() }
        };
        Ok((0..rows).step_by(PIECE_ROWS).map(piece).collect())
    }
}
