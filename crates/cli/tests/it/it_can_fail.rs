//! The tests of commands find defects like those that they are there for: each fails while the program has one.

use crate::programs::fails_with;
use crate::{detected_raw, fewer_layers};

macro_rules! found {
    ($($(#[$doc:meta])* $name:ident: $defect:literal by $test:path;)*) => {
        $(
            $(#[$doc])*
            #[test]
            fn $name() {
                assert!(fails_with($defect, $test), "not found: {}", $defect);
            }
        )*
    };
}

found! {
    trusted_detection: "trusted-detection"
        by detected_raw::no_write_or_zeroing_of_any_part_of_the_first_sector_turns_it_into_another;
    a_commit_trusts_the_detection: "trusted-detection"
        by detected_raw::a_commit_does_not_turn_it_into_an_image_of_another_format;
    plain_names: "plain-names" by fewer_layers::a_layer_that_an_image_needs_under_any_name_is_kept;
    unlocked_deletion: "unlocked-deletion"
        by fewer_layers::a_layer_that_a_running_program_uses_is_not_deleted;
    changed_snapshots: "changed-snapshots"
        by fewer_layers::internal_snapshots_that_read_through_a_layer_are_kept;
    emptied_later: "emptied-later" by fewer_layers::a_commit_holds_the_image_until_it_is_empty;
    absolute_names: "absolute-names"
        by fewer_layers::names_stay_relative_so_that_a_copied_tree_is_a_chain_of_its_own;
    unseen_loop: "unseen-loop"
        by fewer_layers::an_image_is_not_rebased_onto_what_cannot_be_opened_or_onto_itself;
    trusted_note: "trusted-note"
        by fewer_layers::a_layer_stays_whose_merge_was_begun_and_not_finished;
}
