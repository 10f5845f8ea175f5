//! Netlink.
mod message;
