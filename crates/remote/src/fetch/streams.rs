//! Which reads of a layer are those of streams, and how far ahead of them is read.

use std::ops::Range;

/// Streams of a layer that are followed at a time.
const STREAMS: usize = 4;

/// Most blocks ahead of a stream.
const MOST_AHEAD: u64 = 32;

/// A reader that goes forward.
#[derive(Clone, Copy, Debug, Default)]
struct Stream {
    /// The block that it reads next.
    next: u64,
    /// The end of what is read ahead, in blocks.
    end: u64,
    /// Blocks that were read ahead the last time.
    window: u64,
    /// When it was last used.
    used: u64,
}

/// What is to be done about a read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Advice {
    /// Blocks to read ahead.
    pub(crate) ahead: Range<u64>,
    /// Blocks that were read ahead for a stream that has ended.
    pub(crate) left: Range<u64>,
    /// Once this block is read, there is more to read ahead.
    pub(crate) mark: Option<u64>,
}

/// The streams of a layer.
#[derive(Debug, Default)]
pub(crate) struct Streams {
    streams: [Stream; STREAMS],
    now: u64,
}

impl Streams {
    /// Notes a read of these blocks, of which some were missing or one was marked, in a layer of `count`.
    pub(crate) fn read(&mut self, blocks: &Range<u64>, count: u64) -> Advice {
        self.now += 1;
        // One that does not begin where a block does begins in the last block of the one before.
        let goes_on = |stream: &&mut Stream| {
            let begin = stream.next.saturating_sub(1);
            stream.used > 0
                && (begin..=stream.end.max(stream.next)).contains(&blocks.start)
                && blocks.end > stream.next
        };
        if let Some(stream) = self.streams.iter_mut().find(goes_on) {
            let window = (stream.window * 2).clamp(2, MOST_AHEAD);
            let begin = stream.end.max(blocks.end).min(count);
            let end = blocks.end.saturating_add(window).min(count).max(begin);
            *stream = Stream { next: blocks.end, end, window, used: self.now };
            let mark =
                Some(end.saturating_sub(window / 2)).filter(|mark| *mark < end && end < count);
            return Advice { ahead: begin..end, left: 0..0, mark };
        }
        let Some(oldest) = self.streams.iter_mut().min_by_key(|stream| stream.used) else {
            unreachable!("there are streams")
        };
        let left = oldest.next..oldest.end.max(oldest.next);
        *oldest = Stream { next: blocks.end, end: blocks.end, window: 0, used: self.now };
        Advice { left, ..Advice::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_is_read_ahead_further_and_further() {
        let (mut streams, mut windows) = (Streams::default(), Vec::new());
        let mut next = 100;
        assert_eq!(streams.read(&(next..next + 1), 1 << 20), Advice::default());
        for _ in 0..8 {
            next += 1;
            let advice = streams.read(&(next..next + 1), 1 << 20);
            assert!(advice.ahead.start > next, "what is read is not read ahead");
            windows.push(advice.ahead.end - next - 1);
            let mark = advice.mark.unwrap();
            assert!(mark > next && mark < advice.ahead.end);
            next = mark - 1;
        }
        assert_eq!(windows, [2, 4, 8, 16, 32, 32, 32, 32]);
    }

    #[test]
    fn reads_that_do_not_begin_where_a_block_does_are_a_stream() {
        let (mut streams, mut windows) = (Streams::default(), Vec::new());
        for number in 0..6 {
            // Of 1 MiB each, from the middle of a block on.
            let advice = streams.read(&(number * 4..number * 4 + 5), 1 << 20);
            windows.push(advice.ahead.end.saturating_sub(number * 4 + 5));
            assert_eq!(advice.left, 0..0);
        }
        assert_eq!(windows, [0, 2, 4, 8, 16, 32]);
        // One that ends before the stream has come is none of it.
        assert_eq!(streams.read(&(20..21), 1 << 20).ahead, 0..0);
    }

    #[test]
    fn random_reads_read_nothing_ahead() {
        let mut streams = Streams::default();
        for at in [5, 1000, 3, 77, 40_000, 12, 9] {
            let advice = streams.read(&(at..at + 1), 1 << 20);
            assert_eq!((advice.ahead, advice.mark), (0..0, None));
        }
    }

    #[test]
    fn what_was_read_ahead_for_a_reader_that_has_left_is_named() {
        let mut streams = Streams::default();
        streams.read(&(10..11), 1 << 20);
        assert_eq!(streams.read(&(11..12), 1 << 20).ahead, 12..14);
        let others = [1_000, 2_000, 3_000, 4_000];
        let left = others.map(|at| streams.read(&(at..at + 1), 1 << 20).left);
        assert!(left.contains(&(12..14)), "{left:?}");
    }

    #[test]
    fn nothing_is_read_ahead_behind_the_end() {
        let mut streams = Streams::default();
        for at in 0..10 {
            let advice = streams.read(&(at..at + 1), 10);
            assert!(advice.ahead.end <= 10 && advice.ahead.start <= advice.ahead.end, "{advice:?}");
        }
    }
}
