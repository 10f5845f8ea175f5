//! Shield.
