//! Where the lab's parts are: the guests' kernels and tools in the cache, the static agent in the target folder.
//!
//! It finds what `tests/setup.sh` made, and has cargo build nothing but the workspace's own programs.

use std::env;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

use crate::process::find_program;

const TARGET: &str = "x86_64-unknown-linux-gnu";

/// A part that the lab needs and does not find.
#[derive(Debug, thiserror::Error)]
pub enum AssetError {
    /// Not in the cache.
    #[error("{what} expected at {path}, not found; run `make setup`")]
    Missing {
        /// What it is.
        what: &'static str,
        /// Where it was looked for.
        path: PathBuf,
    },
    /// Not among the programs.
    #[error("program {name} not found; run `make setup`")]
    Program {
        /// Its name.
        name: String,
    },
    /// Neither `HINT_LAB_CACHE`, `XDG_CACHE_HOME` nor `HOME` is set.
    #[error("no cache folder: set HINT_LAB_CACHE, XDG_CACHE_HOME or HOME")]
    NoCache,
    /// cargo could not be run.
    #[error("cannot run cargo: {0}")]
    Cargo(io::Error),
    /// The script that finds the kernel with the mask can't be run.
    #[error("cannot run {path}: {source}")]
    Script {
        /// The script.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The kernel with the mask is not in the cache.
    #[error("{0}")]
    Kernel(String),
    /// A program of the workspace does not build.
    #[error("{what} does not build ({command}):\n{stderr}")]
    Build {
        /// What it is.
        what: &'static str,
        /// The command, to be run by hand.
        command: String,
        /// What cargo said.
        stderr: String,
    },
}

/// A kernel that guests can boot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Kernel {
    /// Debian's, as it is.
    #[default]
    Debian,
    /// The lab's own, with a mask of CPUs to avoid at `/sys/devices/system/cpu/paravirt`; see `tests/guest-kernel`.
    Paravirt,
}

/// The guests' kernel and the host programs that boot them.
#[derive(Debug, Clone)]
pub struct Assets {
    /// Kernel image.
    pub kernel: PathBuf,
    /// The kernel's module folder (`.../lib/modules/<release>`); its modules are compressed with xz. `None` for a kernel that has
    /// everything built in.
    pub modules: Option<PathBuf>,
    /// QEMU.
    pub qemu: PathBuf,
    /// Host side of the guests' vsock.
    pub vhost_vsock: PathBuf,
}

impl Assets {
    /// Finds them.
    ///
    /// # Errors
    /// Names the first that is missing.
    pub fn find(kernel: Kernel) -> Result<Self, AssetError> {
        let cache = cache_dir()?;
        let (kernel, modules) = match kernel {
            Kernel::Debian => debian_kernel(&cache)?,
            Kernel::Paravirt => (paravirt_kernel()?, None),
        };
        let vhost_vsock = cache.join("tools/bin/vhost-device-vsock");
        if !vhost_vsock.is_file() {
            return Err(AssetError::Missing {
                what: "vhost-device-vsock",
                path: vhost_vsock,
            });
        }
        Ok(Self {
            kernel,
            modules,
            qemu: program("qemu-system-x86_64")?,
            vhost_vsock,
        })
    }
}

fn debian_kernel(cache: &Path) -> Result<(PathBuf, Option<PathBuf>), AssetError> {
    let folder = cache.join("kernel/current");
    let image =
        only_entry(&folder.join("boot"), "vmlinuz-").ok_or_else(|| AssetError::Missing {
            what: "the guests' kernel",
            path: folder.join("boot/vmlinuz-*"),
        })?;
    let modules =
        only_entry(&folder.join("lib/modules"), "").ok_or_else(|| AssetError::Missing {
            what: "the guests' kernel modules",
            path: folder.join("lib/modules/*"),
        })?;
    Ok((image, Some(modules)))
}

/// The folder where modules for the guests' Debian kernel are built.
///
/// # Errors
/// When kernel or headers are missing.
pub fn kernel_headers() -> Result<PathBuf, AssetError> {
    let (_, modules) = debian_kernel(&cache_dir()?)?;
    let release = modules.as_deref().and_then(Path::file_name);
    let path = Path::new("/usr/lib/modules")
        .join(release.unwrap_or_default())
        .join("build");
    if path.join("Makefile").is_file() {
        Ok(path)
    } else {
        Err(AssetError::Missing {
            what: "the headers of the guests' kernel",
            path,
        })
    }
}

/// Only the script that builds it knows which image belongs to its sources.
fn paravirt_kernel() -> Result<PathBuf, AssetError> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("guest-kernel/build.sh");
    let output = Command::new(&path)
        .arg("--find")
        .output()
        .map_err(|source| AssetError::Script {
            path: path.clone(),
            source,
        })?;
    if output.status.success() {
        let image = String::from_utf8_lossy(&output.stdout);
        Ok(PathBuf::from(image.trim_end()))
    } else {
        let why = String::from_utf8_lossy(&output.stderr);
        Err(AssetError::Kernel(why.trim_end().to_owned()))
    }
}

/// The root of guests with systemd, an archive that a kernel unpacks.
///
/// # Errors
/// When it is not in the cache.
pub fn debian_root() -> Result<PathBuf, AssetError> {
    let path = cache_dir()?.join("debian-root/bookworm.cpio");
    if path.is_file() {
        Ok(path)
    } else {
        Err(AssetError::Missing {
            what: "the root of guests with systemd",
            path,
        })
    }
}

/// The firmware that a PC guest of QEMU boots with.
///
/// # Errors
/// Names the first file that is missing.
pub fn firmware() -> Result<Vec<PathBuf>, AssetError> {
    let files = [
        "/usr/share/seabios/bios-256k.bin",
        "/usr/share/qemu/kvmvapic.bin",
        "/usr/share/qemu/linuxboot_dma.bin",
    ];
    let found = files.map(PathBuf::from).map(|path| match path.is_file() {
        true => Ok(path),
        false => Err(AssetError::Missing {
            what: "firmware of QEMU's guests",
            path,
        }),
    });
    found.into_iter().collect()
}

/// Finds a program that a Debian package brings.
///
/// # Errors
/// When it is not installed.
pub fn program(name: &str) -> Result<PathBuf, AssetError> {
    find_program(name).ok_or_else(|| AssetError::Program {
        name: name.to_owned(),
    })
}

/// The cache of `tests/setup.sh`.
///
/// # Errors
/// When the environment names no folder.
pub fn cache_dir() -> Result<PathBuf, AssetError> {
    let set = |name| env::var_os(name).filter(|value| !value.is_empty());
    set("HINT_LAB_CACHE")
        .map(PathBuf::from)
        .or_else(|| set("XDG_CACHE_HOME").map(|dir| Path::new(&dir).join("hint-broker")))
        .or_else(|| set("HOME").map(|dir| Path::new(&dir).join(".cache/hint-broker")))
        .ok_or(AssetError::NoCache)
}

/// The target folder of this build; the system's folder for temporary files when the program runs from elsewhere.
#[must_use]
pub fn target_dir() -> PathBuf {
    env::current_exe()
        .ok()
        .and_then(|exe| {
            exe.ancestors()
                .find(|dir| dir.join("CACHEDIR.TAG").is_file())
                .map(Path::to_owned)
        })
        .unwrap_or_else(env::temp_dir)
}

/// The static hint-agent for guests: the file that `HINT_AGENT_BIN` names, or a fresh build in `guest` below the target folder.
///
/// The build has a target folder of its own since its compiler flags differ: in the common one each build would undo the other.
///
/// # Errors
/// When the named file is missing or the build fails.
pub fn agent() -> Result<PathBuf, AssetError> {
    if let Some(path) = env::var_os("HINT_AGENT_BIN").filter(|path| !path.is_empty()) {
        let path = PathBuf::from(path);
        return if path.is_file() {
            Ok(path)
        } else {
            Err(AssetError::Missing {
                what: "the agent that HINT_AGENT_BIN names",
                path,
            })
        };
    }

    static BUILT: Mutex<Option<PathBuf>> = Mutex::new(None);
    once(&BUILT, || {
        let target_dir = target_dir().join("guest");
        let mut cargo = cargo();
        cargo
            .args(["-p", "hint-agent", "--bin", "hint-agent"])
            .args(["--profile", "agent", "--target", TARGET, "--target-dir"])
            .arg(&target_dir)
            .env_remove("CARGO_ENCODED_RUSTFLAGS")
            .env("RUSTFLAGS", "-C target-feature=+crt-static");
        build(
            cargo,
            "the static agent",
            target_dir.join(TARGET).join("agent/hint-agent"),
        )
    })
}

/// The hint-broker of this build, with the same optimisation as the caller.
///
/// # Errors
/// When the build fails.
pub fn broker() -> Result<PathBuf, AssetError> {
    static BUILT: Mutex<Option<PathBuf>> = Mutex::new(None);
    once(&BUILT, || {
        // The same choice of packages as in the Makefile: another one means other features, and a build of its own.
        let (choice, folder): (&[&str], _) = if cfg!(debug_assertions) {
            (&["--workspace", "--all-targets"], "debug")
        } else {
            (&["--workspace", "--release"], "release")
        };
        let target_dir = target_dir();
        let mut cargo = cargo();
        cargo.args(choice).arg("--target-dir").arg(&target_dir);
        build(
            cargo,
            "hint-broker",
            target_dir.join(folder).join("hint-broker"),
        )
    })
}

fn once(
    built: &Mutex<Option<PathBuf>>,
    build: impl FnOnce() -> Result<PathBuf, AssetError>,
) -> Result<PathBuf, AssetError> {
    let mut built = built
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    if let Some(path) = built.as_ref() {
        return Ok(path.clone());
    }
    let path = build()?;
    *built = Some(path.clone());
    Ok(path)
}

fn cargo() -> Command {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(workspace).args(["build", "--quiet"]);
    cargo
}

fn build(mut cargo: Command, what: &'static str, path: PathBuf) -> Result<PathBuf, AssetError> {
    let output = cargo.output().map_err(AssetError::Cargo)?;
    if !output.status.success() {
        return Err(AssetError::Build {
            what,
            command: format!("{cargo:?}"),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        });
    }
    if path.is_file() {
        Ok(path)
    } else {
        Err(AssetError::Missing { what, path })
    }
}

/// The one entry of a folder whose name begins so; with several, the last by name.
fn only_entry(folder: &Path, prefix: &str) -> Option<PathBuf> {
    fs::read_dir(folder)
        .ok()?
        .filter_map(Result::ok)
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix))
        .map(|entry| entry.path())
        .max()
}
