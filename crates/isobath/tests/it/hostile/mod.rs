//! Images that are cut short, damaged or made to harm: a clear error that names the image and what is
//! wrong with it; never a panic, a hang, unbounded memory, or a byte from a file that was not meant.

mod changes;
mod damaged;
mod deep;
mod fields;
mod images;
mod journals;
mod memory;
mod moved;
mod names;
mod repair;
mod survive;
mod tables;
