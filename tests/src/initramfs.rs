//! The guests' file system: busybox, kernel modules, the programs of a test with their shared libraries, the lab's scripts.
//!
//! It is built anew for every guest, which takes a fraction of a second, so that it can never be stale.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::assets::{self, AssetError, Assets};

/// The modules of vsock, each after those it needs; below the kernel's module folder.
const VSOCK_MODULES: [&str; 3] = [
    "net/vmw_vsock/vsock",
    "net/vmw_vsock/vmw_vsock_virtio_transport_common",
    "net/vmw_vsock/vmw_vsock_virtio_transport",
];

const SCRIPTS: [(&str, &str); 3] = [
    ("init", include_str!("../rootfs/init")),
    ("lab/work", include_str!("../rootfs/work")),
    ("lab/agent", include_str!("../rootfs/agent")),
];

/// Why an initramfs could not be made.
#[derive(Debug, thiserror::Error)]
pub enum InitramfsError {
    /// A part is missing.
    #[error(transparent)]
    Asset(#[from] AssetError),
    /// A file cannot be read or written.
    #[error("cannot use {path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A helper program failed.
    #[error("{program} failed on {path}: {stderr}")]
    Helper {
        /// The program.
        program: &'static str,
        /// What it worked on.
        path: PathBuf,
        /// What it said.
        stderr: String,
    },
    /// The kernel package lacks a module.
    #[error("kernel module {name} not found below {modules}")]
    NoModule {
        /// The module.
        name: String,
        /// Where it was looked for.
        modules: PathBuf,
    },
}

/// What a guest does once it is up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Role {
    /// It runs the test's commands.
    #[default]
    Commanded,
    /// It is a Debian with systemd, one service of which runs the test's commands.
    Systemd,
    /// It starts its agent, keeps every vCPU busy and prints its work's CPUs on the console, again and again.
    Busy,
}

/// What goes into a guest besides the common parts.
#[derive(Debug, Default)]
pub struct Contents<'a> {
    /// Host name of the guest.
    pub hostname: &'a str,
    /// What it does.
    pub role: Role,
    /// More kernel modules, loaded in this order after those of vsock; each is a path below `kernel/` of the module folder,
    /// without `.ko.xz`.
    pub modules: &'a [String],
    /// More files: where each is on the host, and where in the guest.
    pub files: &'a [(PathBuf, PathBuf)],
    /// Programs of the host, put into /usr/bin with the shared libraries that they need.
    pub programs: &'a [PathBuf],
    /// The static agent, put at /bin/hint-agent.
    pub agent: Option<&'a Path>,
}

/// Writes the initramfs, using `folder` (which must not exist yet) for its files.
///
/// # Errors
/// When a part is missing or a file cannot be written.
pub fn build(
    assets: &Assets,
    contents: &Contents<'_>,
    folder: &Path,
    image: &Path,
) -> Result<(), InitramfsError> {
    let root = Root { folder };
    if contents.role == Role::Systemd {
        return build_systemd(&root, assets, contents, image);
    }
    for dir in [
        "bin",
        "dev",
        "etc",
        "lab/modules",
        "proc",
        "root",
        "run",
        "sys",
        "tmp",
        "usr/bin",
    ] {
        root.make_dir(Path::new(dir))?;
    }
    root.add_busybox()?;
    for (name, text) in SCRIPTS {
        root.write(name, text, 0o755)?;
    }
    let serve = match contents.role {
        Role::Commanded | Role::Systemd => include_str!("../rootfs/serve"),
        Role::Busy => include_str!("../rootfs/busy"),
    };
    root.write("lab/serve", serve, 0o755)?;
    root.write("lab/hostname", contents.hostname, 0o644)?;
    root.write("etc/passwd", "root:x:0:0:root:/root:/bin/sh\n", 0o644)?;
    root.write("etc/group", "root:x:0:\n", 0o644)?;
    root.add_modules(assets.modules.as_deref(), contents.modules)?;

    let mut libraries = BTreeSet::new();
    let mut programs = vec![assets::program("chrt")?, assets::program("hackbench")?];
    programs.extend_from_slice(contents.programs);
    for program in &programs {
        let name = program.file_name().unwrap_or(program.as_os_str());
        root.copy(program, &Path::new("usr/bin").join(name))?;
        libraries.append(&mut shared_libraries(program)?);
    }
    for library in &libraries {
        let inside = library.strip_prefix("/").unwrap_or(library);
        root.copy(library, inside)?;
    }
    for (from, inside) in contents.files {
        root.copy(from, inside.strip_prefix("/").unwrap_or(inside))?;
    }
    if let Some(agent) = contents.agent {
        root.copy(agent, Path::new("bin/hint-agent"))?;
    }
    pack(folder, image)
}

/// Debian's root, and the lab's files in a second archive behind it, which the kernel unpacks over the first.
fn build_systemd(
    root: &Root<'_>,
    assets: &Assets,
    contents: &Contents<'_>,
    image: &Path,
) -> Result<(), InitramfsError> {
    for dir in [
        "etc/systemd/system/multi-user.target.wants",
        "lab/modules",
        "usr/sbin",
    ] {
        root.make_dir(Path::new(dir))?;
    }
    root.write("init", include_str!("../rootfs/systemd-init"), 0o755)?;
    root.write("lab/serve", include_str!("../rootfs/serve"), 0o755)?;
    root.write("lab/hostname", contents.hostname, 0o644)?;
    let service = include_str!("../rootfs/lab.service");
    root.write("etc/systemd/system/lab.service", service, 0o644)?;
    // Without udev the console's login would wait for its device, and every boot with it.
    for (target, link) in [
        ("../lab.service", "multi-user.target.wants/lab.service"),
        ("/dev/null", "serial-getty@ttyS0.service"),
    ] {
        let link = root.folder.join("etc/systemd/system").join(link);
        symlink(target, &link).map_err(|source| io_error(&link, source))?;
    }
    let unit = include_str!("../../deploy/systemd/hint-agent.service");
    root.write("etc/systemd/system/hint-agent.service", unit, 0o644)?;
    root.add_modules(assets.modules.as_deref(), contents.modules)?;
    for (from, inside) in contents.files {
        root.copy(from, inside.strip_prefix("/").unwrap_or(inside))?;
    }
    if let Some(agent) = contents.agent {
        root.copy(agent, Path::new("usr/sbin/hint-agent"))?;
    }
    pack(root.folder, image)?;
    let lab = fs::read(image).map_err(|source| io_error(image, source))?;
    let debian = assets::debian_root()?;
    fs::copy(&debian, image).map_err(|source| io_error(&debian, source))?;
    fs::OpenOptions::new()
        .append(true)
        .open(image)
        .and_then(|mut file| io::Write::write_all(&mut file, &lab))
        .map_err(|source| io_error(image, source))
}

struct Root<'a> {
    folder: &'a Path,
}

impl Root<'_> {
    fn make_dir(&self, inside: &Path) -> Result<(), InitramfsError> {
        let path = self.folder.join(inside);
        fs::create_dir_all(&path).map_err(|source| io_error(&path, source))
    }

    fn write(&self, inside: &str, text: &str, mode: u32) -> Result<(), InitramfsError> {
        let path = self.folder.join(inside);
        fs::write(&path, text)
            .and_then(|()| fs::set_permissions(&path, fs::Permissions::from_mode(mode)))
            .map_err(|source| io_error(&path, source))
    }

    fn copy(&self, from: &Path, inside: &Path) -> Result<(), InitramfsError> {
        if let Some(parent) = inside.parent() {
            self.make_dir(parent)?;
        }
        fs::copy(from, self.folder.join(inside))
            .map(drop)
            .map_err(|source| io_error(from, source))
    }

    fn add_busybox(&self) -> Result<(), InitramfsError> {
        let busybox = assets::program("busybox")?;
        self.copy(&busybox, Path::new("bin/busybox"))?;
        let applets = {
            let mut list = Command::new(&busybox);
            run(
                "busybox",
                list.arg("--list").stdout(Stdio::piped()),
                &busybox,
            )?
        };
        for applet in applets.lines().filter(|applet| *applet != "busybox") {
            let link = self.folder.join("bin").join(applet);
            symlink("busybox", &link).map_err(|source| io_error(&link, source))?;
        }
        Ok(())
    }

    fn add_modules(&self, modules: Option<&Path>, more: &[String]) -> Result<(), InitramfsError> {
        let mut order = String::new();
        let Some(modules) = modules else {
            return self.write("lab/modules/order", &order, 0o644);
        };
        let more = more.iter().map(String::as_str);
        for module in VSOCK_MODULES.into_iter().chain(more) {
            let name = module.rsplit('/').next().unwrap_or(module);
            let packed = modules.join("kernel").join(format!("{module}.ko.xz"));
            if !packed.is_file() {
                return Err(InitramfsError::NoModule {
                    name: module.to_owned(),
                    modules: modules.to_owned(),
                });
            }
            let path = self.folder.join("lab/modules").join(format!("{name}.ko"));
            let file = File::create(&path).map_err(|source| io_error(&path, source))?;
            let mut xz = Command::new("xz");
            xz.arg("--decompress").arg("--stdout").arg(&packed);
            run("xz", xz.stdout(file), &packed)?;
            order.push_str(name);
            order.push('\n');
        }
        self.write("lab/modules/order", &order, 0o644)
    }
}

/// Copies a program without its symbols, which are most of it.
///
/// # Errors
/// When `strip` of binutils fails.
pub fn strip(program: &Path, to: &Path) -> Result<(), InitramfsError> {
    run(
        "strip",
        Command::new("strip").arg("-o").args([to, program]),
        program,
    )
    .map(drop)
}

/// The shared libraries of a program, its loader among them; none for a static one.
fn shared_libraries(program: &Path) -> Result<BTreeSet<PathBuf>, InitramfsError> {
    let output = Command::new("ldd")
        .arg(program)
        .output()
        .map_err(|source| io_error(Path::new("ldd"), source))?;
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    if !output.status.success() && !stderr.contains("not a dynamic executable") {
        return Err(InitramfsError::Helper {
            program: "ldd",
            path: program.to_owned(),
            stderr,
        });
    }
    Ok(libraries_in(&String::from_utf8_lossy(&output.stdout)))
}

fn libraries_in(ldd: &str) -> BTreeSet<PathBuf> {
    ldd.lines()
        .filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')))
        .map(PathBuf::from)
        .collect()
}

fn pack(folder: &Path, image: &Path) -> Result<(), InitramfsError> {
    let file = File::create(image).map_err(|source| io_error(image, source))?;
    let mut shell = Command::new("sh");
    shell
        .args(["-c", "find . -mindepth 1 | cpio --quiet -o -H newc -R 0:0"])
        .current_dir(folder)
        .stdout(file);
    run("cpio", &mut shell, folder).map(drop)
}

fn run(
    program: &'static str,
    command: &mut Command,
    path: &Path,
) -> Result<String, InitramfsError> {
    let output = command
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .and_then(std::process::Child::wait_with_output)
        .map_err(|source| io_error(Path::new(program), source))?;
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    } else {
        Err(InitramfsError::Helper {
            program,
            path: path.to_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        })
    }
}

fn io_error(path: &Path, source: io::Error) -> InitramfsError {
    InitramfsError::Io {
        path: path.to_owned(),
        source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ldd_names_libraries_and_the_loader() {
        let text = "\tlinux-vdso.so.1 (0x00007f3b90a7f000)\n\
            \tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f3b90880000)\n\
            \t/lib64/ld-linux-x86-64.so.2 (0x00007f3b90a81000)\n";
        let want = [
            "/lib/x86_64-linux-gnu/libc.so.6",
            "/lib64/ld-linux-x86-64.so.2",
        ];
        assert!(libraries_in(text).iter().eq(want.map(PathBuf::from).iter()));
        assert!(libraries_in("\tstatically linked\n").is_empty());
    }
}
