//! Checks of the sources and the documentation as texts: the width of lines, the direction of imports, links. They
//! depend on no other crate, so that `make test` fails within seconds because of one.
