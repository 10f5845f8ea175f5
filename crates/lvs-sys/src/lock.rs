//! Locks that ignore the poisoning of a mutex by a panic.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex. In a release build, a panic aborts the program; in a test that catches the panic,
/// the data are still valid.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
