//! What the standard library does not offer: the only place with unsafe code.
#![allow(unsafe_code)]

pub(crate) mod peercred;
