//! Large pages for the connection table of a packet worker. They are requested only when the table
//! is so full that large pages need little additional memory.

use std::thread;
use std::time::Duration;

use lvs_core::memory::{Memory, OutOfMemory};
use lvs_core::{Control, Shard};
use tracing::debug;

use lvs_sys::{TablePages, table_memory};

/// Large pages are requested when more than 1/`PART` of the slots are used: nearly every small page
/// then contains a connection.
const PART: usize = 16;
/// Pause after each large page, during which the kernel handles other requests of this process.
const PAUSE: Duration = Duration::from_millis(2);

/// Creates shard `number` of a director, and the pages of its connection table. If the kernel
/// provides no pages, the table is on the heap, and the pages are `None`. The whole result is
/// `None` if the director has no more shards.
///
/// # Errors
/// The heap has no memory either.
pub(super) fn shard(
    control: &Control,
    number: usize,
) -> Result<Option<(Shard, Option<TablePages>)>, OutOfMemory> {
    let (memory, pages) = match table_memory(control.layout(), false) {
        Ok((memory, pages)) => (memory, Some(pages)),
        Err(_) => (Memory::try_heap(control.layout())?, None),
    };
    let shard = control.shard_in(number, memory);
    Ok(shard.map(|shard| (shard, pages)))
}

pub(super) fn is_time(shard: &Shard) -> bool {
    shard.len() > shard.capacity() / PART
}

/// Converts the pages of a table to large pages, one after the other, in a thread.
pub(super) fn enlarge(pages: TablePages) {
    let run = move || match pages.enlarge(|| thread::sleep(PAUSE)) {
        Ok(made) => debug!("{made} large pages for the connection table"),
        Err(error) => debug!("no large pages for the connection table: {error}"),
    };
    // Without the thread, the pages stay small.
    let _ = thread::Builder::new()
        .name("lvs-pages".to_owned())
        .spawn(run);
}
