//! Scheduling settings that reduce the time until a thread gets a processor.

use std::io;
use std::time::Duration;

use rustix::time::ClockId;

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

/// Length of the struct in bytes, which selects the version.
const LEN: u32 = 48;
const _: () = assert!(size_of::<Attributes>() == LEN as usize);

/// Policies of linux/sched.h.
const SCHED_NORMAL: u32 = 0;
const SCHED_FIFO: u32 = 1;

/// Gives the calling thread this nice value and this length of time slices (100 µs to 100 ms;
/// kernels before Linux 6.12 ignore the length). A thread with shorter slices gets the same share
/// of the processor, but with less delay: when it wakes up, it need not wait for the end of another
/// thread's slice.
///
/// # Errors
/// Without the right to the nice value, or if a sandbox forbids the call.
pub fn run_in_slices(nice: i32, slice: Duration) -> io::Result<()> {
    set_attributes(&Attributes {
        size: LEN,
        policy: SCHED_NORMAL,
        flags: 0,
        nice,
        priority: 0,
        runtime: u64::try_from(slice.as_nanos()).unwrap_or(u64::MAX),
        deadline: 0,
        period: 0,
    })
}

/// Gives the calling thread real-time scheduling at the lowest real-time priority: it runs before
/// all ordinary threads, until it waits.
///
/// # Errors
/// Without CAP_SYS_NICE or `RLIMIT_RTPRIO`, in a control group without real-time scheduling, or if
/// a sandbox forbids the call.
pub fn run_in_real_time() -> io::Result<()> {
    set_attributes(&Attributes {
        size: LEN,
        policy: SCHED_FIFO,
        flags: 0,
        nice: 0,
        priority: 1,
        runtime: 0,
        deadline: 0,
        period: 0,
    })
}

fn set_attributes(attributes: &Attributes) -> io::Result<()> {
    // SAFETY: 0 is the calling thread; the pointer is to attributes that contain their own length,
    // and the kernel only reads them.
    let answer = unsafe {
        libc::syscall(
            libc::SYS_sched_setattr,
            0,
            std::ptr::from_ref(attributes),
            0,
        )
    };
    check_len(isize::try_from(answer).unwrap_or(-1))?;
    Ok(())
}

/// Processor time that the calling thread has used.
pub fn thread_time() -> Duration {
    let time = rustix::time::clock_gettime(ClockId::ThreadCPUTime);
    Duration::try_from(time).unwrap_or_default()
}

/// The processors on which the calling thread may run; empty if the kernel does not report them.
pub fn permitted_cpus() -> Vec<usize> {
    let permitted = rustix::thread::sched_getaffinity(None);
    let permitted = permitted.ok();
    let all = 0..rustix::thread::CpuSet::MAX_CPU;
    all.filter(|&cpu| permitted.as_ref().is_some_and(|set| set.is_set(cpu)))
        .collect()
}

/// Binds the calling thread to one processor.
///
/// # Errors
/// If the thread may not run on this processor.
pub fn run_on(cpu: usize) -> io::Result<()> {
    let mut only = rustix::thread::CpuSet::new();
    only.set(cpu);
    Ok(rustix::thread::sched_setaffinity(None, &only)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_accepts_time_slices_of_100_microseconds() {
        let ran = std::thread::spawn(|| run_in_slices(0, Duration::from_micros(100)));
        ran.join()
            .expect("the thread does not panic")
            .expect("no limit forbids the time slice");
    }

    #[test]
    fn thread_time_increases_with_computation() {
        let began = thread_time();
        std::thread::sleep(Duration::from_millis(1));
        let mut sum = 0_u64;
        while thread_time() == began {
            sum = std::hint::black_box(sum.wrapping_add(1));
        }
        assert!(thread_time() > began);
    }
}
