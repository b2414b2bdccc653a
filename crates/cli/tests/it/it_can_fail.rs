//! The tests of commands find defects like those that they are there for: each fails while the program has one.

use crate::programs::fails_with;
use crate::{detected_raw, fewer_layers};

macro_rules! found {
    ($($name:ident: $defect:literal by $test:path, saying $words:literal;)*) => {
        $(
            #[test]
            fn $name() {
                let reason = fails_with($defect, $test);
                let reason = reason.unwrap_or_else(|| panic!("not found: {}", $defect));
                // Not because the program with the defect does nothing.
                assert!(reason.contains($words), "found for another reason: {reason}");
            }
        )*
    };
}

found! {
    trusted_detection: "trusted-detection"
        by detected_raw::no_write_or_zeroing_of_any_part_of_the_first_sector_turns_it_into_another,
        saying "qcow2, 0";
    a_commit_trusts_the_detection: "trusted-detection"
        by detected_raw::a_commit_does_not_turn_it_into_an_image_of_another_format,
        saying "Image committed";
    plain_names: "plain-names"
        by fewer_layers::a_layer_that_an_image_needs_under_any_name_is_kept,
        saying "Layer removed";
    unlocked_deletion: "unlocked-deletion"
        by fewer_layers::a_layer_that_a_running_program_uses_is_not_deleted,
        saying "Layer removed";
    changed_snapshots: "changed-snapshots"
        by fewer_layers::internal_snapshots_that_read_through_a_layer_are_kept,
        saying "Layer removed";
    emptied_later: "emptied-later"
        by fewer_layers::a_commit_holds_the_image_until_it_is_empty,
        saying "more than once";
    absolute_names: "absolute-names"
        by fewer_layers::names_stay_relative_so_that_a_copied_tree_is_a_chain_of_its_own,
        saying "Could not open backing file";
    unseen_loop: "unseen-loop"
        by fewer_layers::an_image_is_not_rebased_onto_what_cannot_be_opened_or_onto_itself,
        saying "exit status: 0";
    trusted_note: "trusted-note"
        by fewer_layers::a_layer_stays_whose_merge_was_begun_and_not_finished,
        saying "Layer removed";
}
