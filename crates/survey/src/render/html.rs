//! stub
use crate::{Report, Survey};
/// stub
pub fn html(_s: &Survey, _r: &Report, _l: super::Listing) -> String {
    String::new()
}
