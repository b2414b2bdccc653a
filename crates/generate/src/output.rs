//! A file written sequentially, cluster by cluster, with holes for zeroes.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// The maximum number of bytes gathered for one write, unless a cluster is larger.
const GATHERED: usize = 4 << 20;
/// Aligned blocks of this many zero bytes become holes.
const HOLE: usize = 32 << 10;
/// Writes begin and end at multiples of this many bytes.
const PAGE: usize = 4 << 10;
static ZEROES: [u8; HOLE] = [0; HOLE];

/// Writes a file's clusters one after another.
pub(crate) struct Output<'a> {
    file: &'a File,
    cluster_size: usize,
    /// Reused from file to file.
    buffer: &'a mut Vec<u8>,
    /// The offset of the buffer's bytes in the file.
    start: u64,
}

impl<'a> Output<'a> {
    /// Begins at the start of an empty file.
    pub(crate) fn new(file: &'a File, cluster_size: u64, buffer: &'a mut Vec<u8>) -> Self {
        buffer.clear();
        Self { file, cluster_size: cluster_size as usize, buffer, start: 0 }
    }

    /// The next cluster, zeroed, to be filled in.
    pub(crate) fn cluster(&mut self) -> io::Result<&mut [u8]> {
        if self.buffer.len() + self.cluster_size > GATHERED.max(self.cluster_size) {
            self.write()?;
        }
        let place = self.buffer.len();
        self.buffer.resize(place + self.cluster_size, 0);
        Ok(&mut self.buffer[place..])
    }

    /// Leaves the next `clusters` clusters zero.
    pub(crate) fn skip(&mut self, clusters: u64) -> io::Result<()> {
        self.write()?;
        self.start += clusters * self.cluster_size as u64;
        Ok(())
    }

    /// Writes the gathered bytes, and sets the file's length.
    pub(crate) fn end(mut self) -> io::Result<()> {
        self.write()?;
        self.file.set_len(self.start)
    }

    fn write(&mut self) -> io::Result<()> {
        let mut run = None;
        for at in (0..self.buffer.len()).step_by(HOLE) {
            let block = &self.buffer[at..self.buffer.len().min(at + HOLE)];
            if *block != ZEROES[..block.len()] {
                run.get_or_insert(at);
            } else if let Some(first) = run.take() {
                self.write_run(first, at)?;
            }
        }
        if let Some(first) = run {
            self.write_run(first, self.buffer.len())?;
        }
        self.start += self.buffer.len() as u64;
        self.buffer.clear();
        Ok(())
    }

    /// Writes bytes `first..end` of the buffer without leading and trailing pages of zeroes.
    fn write_run(&self, mut first: usize, mut end: usize) -> io::Result<()> {
        let zero = |bytes: &[u8]| *bytes == ZEROES[..bytes.len()];
        while end - first > PAGE && zero(&self.buffer[first..first + PAGE]) {
            first += PAGE;
        }
        while let Some(last) =
            end.checked_sub(1).map(|last| last / PAGE * PAGE).filter(|l| *l > first)
            && zero(&self.buffer[last..end])
        {
            end = last;
        }
        self.file.write_all_at(&self.buffer[first..end], self.start + first as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn clusters_arrive_where_they_belong_and_zeroes_take_no_space() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let file = File::create(&path).unwrap();
        let mut buffer = vec![9; 100];
        for cluster_size in [512usize, 65536, 2 << 20] {
            file.set_len(0).unwrap();
            let mut output = Output::new(&file, cluster_size as u64, &mut buffer);
            let mut expected = Vec::new();
            for number in 0..12u8 {
                let cluster = output.cluster().unwrap();
                assert!(cluster.iter().all(|byte| *byte == 0));
                if number % 4 == 1 {
                    cluster[cluster_size / 2] = number;
                }
                expected.extend_from_slice(cluster);
                if number == 6 {
                    output.skip(20).unwrap();
                    expected.resize(expected.len() + 20 * cluster_size, 0);
                }
            }
            output.skip(3).unwrap();
            expected.resize(expected.len() + 3 * cluster_size, 0);
            output.end().unwrap();
            assert!(std::fs::read(&path).unwrap() == expected, "{cluster_size}");
            if cluster_size > HOLE {
                assert_eq!(file.metadata().unwrap().blocks() * 512, 3 * PAGE as u64);
            }
        }
    }
}
