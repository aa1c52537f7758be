//! The clock of leases, `CLOCK_BOOTTIME`: monotonic, and it goes on while the guest itself is suspended.
//!
//! When the VMM stops the guest, or restores it from a snapshot, no clock of the guest shows that: what is left of a lease runs on
//! afterwards. So a guest is never folded for longer than one lease of the time in which it runs, whatever happens to it.

use std::io;
use std::ops::Add;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::time::{
    ClockId, Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, clock_gettime,
    timerfd_create, timerfd_settime,
};
use tokio::io::unix::AsyncFd;

/// A moment of the clock of leases.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Moment(Duration);

impl Moment {
    /// This moment.
    #[must_use]
    pub fn now() -> Self {
        let now = clock_gettime(ClockId::Boottime);
        Self(Duration::new(
            u64::try_from(now.tv_sec).unwrap_or(0),
            u32::try_from(now.tv_nsec).unwrap_or(0),
        ))
    }

    /// From an earlier moment to this one; zero when that is later.
    #[must_use]
    pub fn saturating_duration_since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }

    fn timespec(self) -> Timespec {
        Timespec {
            tv_sec: i64::try_from(self.0.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: self.0.subsec_nanos().into(),
        }
    }
}

impl Add<Duration> for Moment {
    type Output = Self;

    fn add(self, length: Duration) -> Self {
        Self(self.0.saturating_add(length))
    }
}

/// Wakes the event loop at a moment, and at once after a suspension that outlasted it.
#[derive(Debug)]
pub struct Alarm {
    timer: AsyncFd<OwnedFd>,
    set: Option<Moment>,
}

impl Alarm {
    /// An alarm that is not set. It belongs to the event loop that it is made in.
    ///
    /// # Errors
    /// The kernel's.
    #[allow(
        deprecated,
        reason = "unsound for types whose descriptor may change; that of an OwnedFd never does, and the successor needs unsafe code"
    )]
    pub fn new() -> io::Result<Self> {
        let timer = timerfd_create(
            TimerfdClockId::Boottime,
            TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC,
        )?;
        Ok(Self {
            timer: AsyncFd::new(timer)?,
            set: None,
        })
    }

    /// Waits until `due`, for ever without one. It may be dropped and called again.
    ///
    /// # Errors
    /// The kernel's.
    pub async fn wait(&mut self, due: Option<Moment>) -> io::Result<()> {
        let Some(due) = due else {
            return std::future::pending().await;
        };
        // All zeros would disarm the timer, but the clock has left zero long ago.
        if self.set != Some(due) {
            let none = Timespec {
                tv_sec: 0,
                tv_nsec: 0,
            };
            let at = Itimerspec {
                it_interval: none,
                it_value: due.timespec(),
            };
            timerfd_settime(self.timer.get_ref(), TimerfdTimerFlags::ABSTIME, &at)?;
            self.set = Some(due);
        }
        loop {
            let mut ready = self.timer.readable().await?;
            let mut expirations = [0; 8];
            if let Ok(read) =
                ready.try_io(|timer| Ok(rustix::io::read(timer.get_ref(), &mut expirations)?))
            {
                read?;
                self.set = None;
                return Ok(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_added_and_subtracted() {
        let now = Moment::now();
        let later = now + Duration::from_millis(1500);
        assert_eq!(
            later.saturating_duration_since(now),
            Duration::from_millis(1500)
        );
        assert_eq!(now.saturating_duration_since(later), Duration::ZERO);
        assert!(now < later && Moment::now() >= now);
    }

    #[tokio::test]
    async fn the_alarm_rings_at_its_moment_also_when_that_is_past_or_moved() {
        let mut alarm = Alarm::new().unwrap();
        let start = Moment::now();
        alarm.wait(Some(start)).await.unwrap();
        let long = Duration::from_secs(3600);
        let waited =
            tokio::time::timeout(Duration::from_millis(20), alarm.wait(Some(start + long)));
        waited.await.unwrap_err();
        let due = Moment::now() + Duration::from_millis(30);
        alarm.wait(Some(due)).await.unwrap();
        assert!(Moment::now() >= due);
        // The same moment once more: it has passed, so it rings at once.
        alarm.wait(Some(due)).await.unwrap();
    }
}
