//! A Linux guest, and the required state of its files after a crash.

use super::serve::Frontend;
use isobath_testkit::guest::Guest;
use isobath_testkit::process::run_program;
use isobath_testkit::{args, tools};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::thread;
use std::time::Duration;

/// The interval at which the console is read.
const PAUSE: Duration = Duration::from_millis(2);

/// Files, appends and overwrites that a guest makes.
const ROUNDS: usize = 12;

/// Makes an ext4; then in each round a new file, 64 KiB appended to a file, and 64 KiB of a file overwritten, each with
/// fsync and reported on the console.
fn script() -> String {
    format!(
        "mkfs.ext4 -q -F -b 4096 -E lazy_itable_init=0,lazy_journal_init=0 /dev/vda\n\
         mount -t ext4 -o discard /dev/vda /mnt\n\
         sync\n\
         echo MOUNTED\n\
         round=0\n\
         while [ $round -lt {ROUNDS} ]; do\n\
           round=$((round + 1))\n\
           dd if=/dev/urandom of=/mnt/file$round bs=4k count=$((round * 5 % 17 + 1)) conv=fsync 2>/dev/null\n\
           echo FILE file$round $(md5sum </mnt/file$round)\n\
           dd if=/dev/urandom of=/tmp/piece bs=64k count=1 2>/dev/null\n\
           dd if=/tmp/piece of=/mnt/appended bs=64k oflag=append conv=notrunc,fsync 2>/dev/null\n\
           cat /tmp/piece >>/tmp/appended\n\
           echo APPENDED $round $(md5sum </tmp/appended)\n\
           echo BEGIN $round\n\
           yes $(printf %0511d $round) | head -c 65536 >/tmp/piece\n\
           dd if=/tmp/piece of=/mnt/overwritten bs=64k conv=notrunc,fsync 2>/dev/null\n\
           echo OVERWRITTEN $round\n\
           if [ $((round % 4)) = 0 ]; then rm /mnt/file$((round - 1)); sync; fi\n\
         done\n\
         echo DONE\n\
         dd if=/dev/urandom of=/mnt/lost bs=4k count=100 2>/dev/null\n\
         sleep 600\n"
    )
}

/// A line that the guest wrote.
struct Line {
    /// Entries of the record when the line was not there yet.
    after: usize,
    /// Entries of the record when it was.
    by: usize,
    words: Vec<String>,
}

/// The guest's reports about its files.
pub struct Files {
    lines: Vec<Line>,
}

/// Boots a guest on the disk, and kills it when it is done.
pub fn run(frontend: &Frontend) -> Result<Files, String> {
    let guest = Guest::new().program("mkfs.ext4").nbd(&frontend.socket, "");
    let mut guest = guest.spawn(&script());
    let mut lines = Vec::new();
    guest.wait_for("MOUNTED");
    let mut after = 0;
    loop {
        let seen = frontend.record.len();
        let console = guest.console();
        let by = frontend.record.len();
        let complete = console.rsplit_once('\n').map_or("", |(complete, _)| complete);
        let told: Vec<&str> = complete.lines().skip_while(|line| *line != "MOUNTED").collect();
        for line in told.iter().skip(lines.len()) {
            let words = line.split_whitespace().map(str::to_owned).collect();
            lines.push(Line { after, by, words });
        }
        after = seen;
        if let Some(status) = told.iter().find(|line| line.starts_with("GUEST-EXIT")) {
            return Err(format!("the script in the guest ended: {status}\n{console}"));
        }
        if told.contains(&"DONE") {
            break;
        }
        thread::sleep(PAUSE);
    }
    // Whatever is still in its memory is lost.
    thread::sleep(Duration::from_millis(200));
    drop(guest.kill());
    Ok(Files { lines })
}

impl Files {
    /// Checks the raw disk of a guest; `tree` is a directory for its files.
    ///
    /// # Errors
    /// The file system is damaged, or a file that was synced before the crash differs.
    pub fn check(&self, position: usize, raw: &Path, tree: &Path) -> Result<(), String> {
        let told = || self.lines.iter().filter(|line| line.by <= position);
        if told().next().is_none() {
            return Ok(());
        }
        // Replays the file system's journal; repairs only what a crash may leave.
        let mended = run_program(tools::require("e2fsck"), args!["-f", "-p", raw]);
        if mended.code() > 1 {
            return Err(format!("the file system is damaged: {}", mended.report()));
        }
        let judged = run_program(tools::require("e2fsck"), args!["-f", "-n", raw]);
        if judged.code() != 0 {
            return Err(format!("the file system is not clean: {}", judged.report()));
        }
        let _ = fs::remove_dir_all(tree);
        fs::create_dir(tree).map_err(|error| format!("no directory: {error}"))?;
        let request = format!("rdump / {}", tree.display());
        let dumped = run_program(tools::require("debugfs"), args!["-R", request, raw]);
        let read = |name: &str| {
            fs::read(tree.join(name))
                .map_err(|_| format!("'{name}' is not there: {}", dumped.report()))
        };
        // A file is removed between its line and the next of its kind.
        let removed = |name: &str| {
            let number = |line: &Line| line.words.get(1).and_then(|round| round.parse().ok());
            let begun: Option<usize> = self
                .lines
                .iter()
                .filter(|line| is(line, "OVERWRITTEN") && line.after <= position)
                .filter_map(number)
                .filter(|round: &usize| round.is_multiple_of(4))
                .find(|round| name == format!("file{}", round - 1));
            begun.is_some()
        };
        let mut appended = None;
        let mut overwritten = 0;
        for line in told() {
            match line.words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
                ["FILE", name, sum, "-"] if !removed(name) => {
                    let found = md5(tree, name, usize::MAX)?;
                    if found != sum {
                        return Err(format!("'{name}' is {found}, not {sum}: {}", dumped.report()));
                    }
                }
                ["APPENDED", round, sum, "-"] => appended = Some((round.to_owned(), sum)),
                ["OVERWRITTEN", round] => overwritten = round.parse().unwrap_or(0),
                _ => {}
            }
        }
        if let Some((round, sum)) = appended {
            let length = round.parse::<usize>().unwrap_or(0) << 16;
            let found = md5(tree, "appended", length)?;
            if found != sum {
                return Err(format!(
                    "the first {length} bytes of 'appended' are {found}, not {sum}"
                ));
            }
        }
        if overwritten > 0 {
            let begun =
                self.lines.iter().filter(|line| is(line, "BEGIN") && line.after <= position);
            let allowed: BTreeMap<String, usize> = (overwritten..=begun.count())
                .map(|round| (format!("{round:0511}\n"), round))
                .collect();
            let bytes = read("overwritten")?;
            let is_allowed = |piece: &[u8]| {
                std::str::from_utf8(piece).is_ok_and(|text| allowed.contains_key(text))
            };
            if bytes.len() != 64 << 10 || !bytes.chunks(512).all(is_allowed) {
                return Err(format!(
                    "'overwritten' is not of rounds {:?}",
                    allowed.values().collect::<Vec<_>>()
                ));
            }
        }
        Ok(())
    }
}

fn is(line: &Line, word: &str) -> bool {
    line.words.first().is_some_and(|first| first == word)
}

/// The checksum of the first bytes of a file.
fn md5(tree: &Path, name: &str, length: usize) -> Result<String, String> {
    let path = tree.join(name);
    let bytes = fs::read(&path).map_err(|error| format!("'{name}': {error}"))?;
    fs::write(&path, &bytes[..length.min(bytes.len())])
        .map_err(|error| format!("'{name}': {error}"))?;
    let sum = run_program(tools::require("busybox"), args!["md5sum", path]).ok().text();
    Ok(sum.split_whitespace().next().unwrap_or_default().to_owned())
}
