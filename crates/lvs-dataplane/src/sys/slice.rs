//! How soon a thread gets a processor.

use std::io;
use std::time::Duration;

use super::check_len;

/// `struct sched_attr` of linux/sched/types.h, its first version.
#[repr(C)]
struct Attributes {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime: u64,
    deadline: u64,
    period: u64,
}

/// Its length, which says what version it is.
const LEN: u32 = 48;
const _: () = assert!(size_of::<Attributes>() == LEN as usize);

/// Has the calling thread run with this nice value, in slices of this length (100 µs to 100 ms; Linux since 6.12, others take no
/// notice). One that runs in shorter slices than others gets no more of the processor than they do, but sooner: when it wakes
/// up, it need not wait until the slice of another is over.
///
/// # Errors
/// Without the right to the nice value, or where a sandbox forbids the call.
pub fn run_in_slices(nice: i32, slice: Duration) -> io::Result<()> {
    let attributes = Attributes {
        size: LEN,
        // SCHED_OTHER.
        policy: 0,
        flags: 0,
        nice,
        priority: 0,
        runtime: u64::try_from(slice.as_nanos()).unwrap_or(u64::MAX),
        deadline: 0,
        period: 0,
    };
    // SAFETY: the thread is the calling one; the pointer is to attributes whose length they tell, which the kernel only reads.
    let answer = unsafe {
        libc::syscall(
            libc::SYS_sched_setattr,
            0,
            std::ptr::from_ref(&attributes),
            0,
        )
    };
    check_len(isize::try_from(answer).unwrap_or(-1))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_runs_in_short_slices() {
        let ran = std::thread::spawn(|| run_in_slices(0, Duration::from_micros(100)));
        ran.join().expect("no panic").expect("nothing forbids it");
    }
}
