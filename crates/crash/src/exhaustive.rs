//! Small histories, with every crash there is.
