//! Random tests that can be repeated.

use rand::SeedableRng;
use rand::rngs::StdRng;
use std::env;
use std::thread;

/// The seed of a random test: `ISOBATH_SEED` if set, otherwise a new one. A test that fails while it holds a seed
/// prints the command to repeat it.
#[derive(Debug)]
pub struct Seed {
    value: u64,
}

impl Seed {
    /// A new seed, or the one from the environment (decimal, or hexadecimal with `0x`).
    #[track_caller]
    pub fn new() -> Self {
        let Ok(text) = env::var("ISOBATH_SEED") else { return Self::from(rand::random::<u64>()) };
        let value = match text.strip_prefix("0x") {
            Some(digits) => u64::from_str_radix(digits, 16),
            None => text.parse(),
        };
        Self::from(value.unwrap_or_else(|error| panic!("ISOBATH_SEED={text}: {error}")))
    }

    /// The seed's value.
    pub fn value(&self) -> u64 {
        self.value
    }

    /// A generator that starts from the seed.
    pub fn rng(&self) -> StdRng {
        StdRng::seed_from_u64(self.value)
    }
}

impl Default for Seed {
    fn default() -> Self {
        Self::new()
    }
}

impl From<u64> for Seed {
    fn from(value: u64) -> Self {
        Self { value }
    }
}

impl Drop for Seed {
    fn drop(&mut self) {
        if thread::panicking() {
            let test = thread::current().name().unwrap_or("the test").to_owned();
            eprintln!("to repeat: ISOBATH_SEED={:#x} cargo test {test}", self.value);
        }
    }
}
