//! When to look at the host next: at the usual pace, and once a second while it is quiet and the kernel promises to tell when
//! that ends.
//!
//! ```text
//!            calm for 5 s, and there is a pressure trigger; 1 s when pressure came and nothing with it
//!   usual ───────────────────────────────────────────────► quiet
//!     ▲                                                      │
//!     └──────── tasks wait for pCPUs, or not calm ───────────┘
//! ```

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::time::Duration;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::timeout;

use crate::root::Root;

/// Between two looks while all is quiet.
const QUIET: Duration = Duration::from_secs(1);
/// A host is quiet after it has been calm for so long.
const CALM_FOR: Duration = Duration::from_secs(5);
/// And after so long when tasks waited, and each look since then found it calm: contention shows within half a second.
const CALM_AGAIN: Duration = Duration::from_secs(1);
/// Some task waited for a pCPU during so many microseconds of so many (Documentation/accounting/psi.rst): the shortest window
/// that the kernel takes, and one for who lacks CAP_SYS_RESOURCE. With the longer one a look comes first, most often.
const TRIGGERS: [&[u8]; 2] = [b"some 50000 500000\0", b"some 100000 2000000\0"];

/// `PROC_SUPER_MAGIC` (linux/magic.h).
const PROC: rustix::fs::FsWord = 0x9fa0;

/// Chooses the pace.
#[derive(Debug)]
pub(super) struct Cadence {
    usual: Duration,
    may_be_quiet: bool,
    calm_since: Option<Duration>,
    calm_for: Duration,
    quiet: bool,
}

impl Cadence {
    /// Looks every `usual` time; at most that often. Without `may_be_quiet`, always so.
    pub(super) fn new(usual: Duration, may_be_quiet: bool) -> Self {
        Self {
            usual,
            may_be_quiet,
            calm_since: None,
            calm_for: CALM_FOR,
            quiet: false,
        }
    }

    /// A look at time `at` found the host `calm` or not.
    pub(super) fn looked(&mut self, at: Duration, calm: bool) {
        if !calm {
            self.calm_since = None;
            self.calm_for = CALM_FOR;
        }
        let since = calm.then(|| *self.calm_since.get_or_insert(at));
        let long_enough = since.is_some_and(|since| at.saturating_sub(since) >= self.calm_for);
        self.quiet = self.may_be_quiet && long_enough;
    }

    /// Tasks wait for pCPUs.
    pub(super) fn pressed(&mut self) {
        self.calm_since = None;
        self.calm_for = CALM_AGAIN;
        self.quiet = false;
    }

    pub(super) fn is_quiet(&self) -> bool {
        self.quiet
    }

    /// Time until the next look.
    pub(super) fn interval(&self) -> Duration {
        match self.quiet {
            true => QUIET.max(self.usual),
            false => self.usual,
        }
    }
}

/// The kernel's word when tasks begin to wait for pCPUs.
#[derive(Debug)]
pub(super) struct Pressure(AsyncFd<File>);

impl Pressure {
    /// Asks for it.
    ///
    /// # Errors
    /// When the kernel keeps no pressure figures, or this process may not ask.
    #[allow(
        deprecated,
        reason = "its successor is unsafe for the sake of types that change their descriptor; a File keeps it"
    )]
    pub(super) fn open(root: &Root) -> io::Result<Self> {
        let path = root.path("proc/pressure/cpu");
        let mut file = OpenOptions::new().read(true).write(true).open(path)?;
        // Nothing is written to what only has that name.
        if rustix::fs::fstatfs(&file)?.f_type != PROC {
            return Err(io::ErrorKind::Unsupported.into());
        }
        // First the trigger: a file without one has nothing to wait for, also later.
        file.write_all(TRIGGERS[0])
            .or_else(|_| file.write_all(TRIGGERS[1]))?;
        Ok(Self(AsyncFd::with_interest(file, Interest::PRIORITY)?))
    }

    /// Forgets what the kernel told before now: it is kept until somebody takes it, and that they waited once is no news later.
    pub(super) async fn forget(&self) {
        // Without anything to forget the time is over at once.
        let _ = timeout(Duration::ZERO, self.rises()).await;
    }

    /// Waits until tasks wait.
    pub(super) async fn rises(&self) {
        match self.0.ready(Interest::PRIORITY).await {
            Ok(mut ready) => ready.clear_ready(),
            // The runtime ends, and everything with it.
            Err(_) => std::future::pending().await,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    const USUAL: Duration = Duration::from_millis(100);

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn it_slows_down_after_a_calm_while_and_not_before() {
        let mut cadence = Cadence::new(USUAL, true);
        for second in 0..5 {
            cadence.looked(at(second), true);
            assert_eq!(cadence.interval(), USUAL);
        }
        cadence.looked(at(5), true);
        assert!(cadence.is_quiet());
        assert_eq!(cadence.interval(), QUIET);
        cadence.looked(at(6), false);
        assert_eq!(cadence.interval(), USUAL);
        cadence.looked(at(7), true);
        cadence.looked(at(11), true);
        assert_eq!(cadence.interval(), USUAL, "calm begins anew");
        cadence.looked(at(12), true);
        assert_eq!(cadence.interval(), QUIET);
    }

    #[test]
    fn pressure_ends_the_quiet() {
        let mut cadence = Cadence::new(USUAL, true);
        cadence.looked(at(0), true);
        cadence.looked(at(5), true);
        cadence.pressed();
        assert_eq!(cadence.interval(), USUAL);
        cadence.looked(at(6), true);
        assert_eq!(cadence.interval(), USUAL);
        cadence.looked(at(7), true);
        assert!(cadence.is_quiet(), "nothing came of it");
        cadence.pressed();
        cadence.looked(at(8), false);
        cadence.looked(at(9), true);
        cadence.looked(at(13), true);
        assert_eq!(cadence.interval(), USUAL, "something did");
        cadence.looked(at(14), true);
        assert!(cadence.is_quiet());
    }

    /// A stream's urgent byte wakes as a pressure trigger does.
    #[allow(deprecated, reason = "as for the real one")]
    #[tokio::test]
    async fn pressure_of_the_past_is_forgotten() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let here = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (there, _) = listener.accept().unwrap();
        here.set_nonblocking(true).unwrap();
        let file = File::from(std::os::fd::OwnedFd::from(here));
        let pressure = Pressure(AsyncFd::with_interest(file, Interest::PRIORITY).unwrap());
        let press = || rustix::net::send(&there, b"!", rustix::net::SendFlags::OOB).unwrap();
        press();
        drop(pressure.0.ready(Interest::PRIORITY).await.unwrap());
        pressure.forget().await;
        let waits = timeout(Duration::from_millis(50), pressure.rises());
        assert!(waits.await.is_err(), "the past came back");
        press();
        timeout(Duration::from_secs(60), pressure.rises())
            .await
            .unwrap();
    }

    #[test]
    fn without_the_kernels_word_it_never_slows_down() {
        let mut cadence = Cadence::new(USUAL, false);
        cadence.looked(at(0), true);
        cadence.looked(at(60), true);
        assert_eq!(cadence.interval(), USUAL);
        let mut slow = Cadence::new(at(2), true);
        slow.looked(at(0), true);
        slow.looked(at(60), true);
        assert_eq!(slow.interval(), at(2), "never faster than it was told");
    }

    #[tokio::test]
    async fn the_kernel_tells_when_tasks_wait() {
        let pressure = match Pressure::open(&Root::new("/")) {
            Ok(pressure) => pressure,
            Err(error) => {
                eprintln!("SKIPPED the_kernel_tells_when_tasks_wait: /proc/pressure/cpu ({error})");
                return;
            }
        };
        let stop = Arc::new(AtomicBool::new(false));
        let pcpus = std::thread::available_parallelism().unwrap().get();
        let spinners: Vec<_> = (0..2 * pcpus)
            .map(|_| {
                let stop = Arc::clone(&stop);
                std::thread::spawn(move || while !stop.load(Ordering::Relaxed) {})
            })
            .collect();
        let twice = async {
            pressure.rises().await;
            pressure.rises().await;
        };
        let told = tokio::time::timeout(Duration::from_secs(60), twice).await;
        stop.store(true, Ordering::Relaxed);
        for spinner in spinners {
            spinner.join().unwrap();
        }
        told.unwrap();
    }

    #[tokio::test]
    async fn an_ordinary_file_is_no_pressure_and_is_left_as_it_is() {
        let tree = crate::fixture::Tree::new("[proc/pressure]\ncpu = some avg10=0.00\n");
        assert!(Pressure::open(&tree.root).is_err());
        let text = tree.root.read_text("proc/pressure/cpu").unwrap();
        assert_eq!(text.as_deref(), Some("some avg10=0.00\n"));
        tree.remove("proc/pressure");
        assert!(Pressure::open(&tree.root).is_err());
    }
}
