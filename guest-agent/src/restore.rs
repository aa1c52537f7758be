//! How the guest gets its mask back: a record of the text that each kernel file had and of what was written to it.
//!
//! The record is on disk before the first write to the kernel, and gone when everything is back. The agent, its guardian
//! and `hint-agent restore` all call [`restore`]; running it twice is harmless. *When* to restore is decided elsewhere.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use hint_proto::CpuSet;
use serde::{Deserialize, Serialize};

use crate::files::{Files, is_gone};
use crate::open::open_all;
use crate::system;

/// What must be put back.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Record {
    /// The boot in which it was made; another boot has nothing to restore.
    pub boot_id: Option<String>,
    /// The actuator's name.
    pub actuator: String,
    /// Files that were written, in the order of writing.
    pub files: Vec<Entry>,
    /// The `cgroup.subtree_control` into which the agent has put `+cpuset`.
    pub enabled_cpuset: Option<PathBuf>,
}

/// What other programs are told while the guest is folded, or would be.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct Published {
    /// The number of vCPUs that the host says can run.
    pub usable: u32,
    /// The VM's vCPUs, as the host counts them.
    pub vcpus: u32,
    /// The actuator; with `observe` nothing is applied.
    pub actuator: String,
    /// CPUs to use, as a kernel cpulist.
    pub preferred: String,
    /// Online CPUs, as a kernel cpulist.
    pub online: String,
}

/// One file of a record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// The file, as the guest names it.
    pub path: PathBuf,
    /// Its text before the agent wrote it for the first time.
    pub found: String,
    /// Texts for the same mask, or the nearest, to try in this order when the kernel refuses `found`.
    pub instead: Vec<String>,
    /// Texts that the agent may have left in it: the last one, and the one before while a change is under way.
    pub wrote: Vec<String>,
    /// May somebody else own the file too? Then a text that is neither `found` nor in `wrote` is theirs and stays.
    pub shared: bool,
}

impl Entry {
    /// Whose text is `current`?
    #[must_use]
    pub fn author(&self, current: &str) -> Author {
        let same_as_found = |text| same(current, text);
        if same_as_found(&self.found) || self.instead.iter().any(|text| same_as_found(text)) {
            Author::Found
        } else if self.wrote.iter().any(|text| same(current, text)) {
            Author::Agent
        } else {
            Author::Other
        }
    }

    /// Notes that `text` is about to be written over `current`.
    pub fn will_write(&mut self, current: &str, text: &str) {
        let before = (self.author(current) == Author::Agent).then(|| current.to_owned());
        self.wrote = before.into_iter().chain([text.to_owned()]).collect();
    }
}

/// Who put a text into a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Author {
    /// It is what the agent had found, or stands for it.
    Found,
    /// The agent.
    Agent,
    /// Somebody else, while the guest was folded.
    Other,
}

/// The text to write for `text`: the kernel ignores writes of no bytes, a newline clears.
#[must_use]
pub fn writable_text(text: &str) -> &str {
    if text.is_empty() { "\n" } else { text }
}

fn same(a: &str, b: &str) -> bool {
    a.trim() == b.trim()
        || matches!((CpuSet::parse_list(a), CpuSet::parse_list(b)), (Ok(a), Ok(b)) if a == b)
}

/// What a restoration did.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct Restored {
    /// Files that have their text back.
    pub files: Vec<PathBuf>,
    /// Files for which the kernel refuses the text that was found, and what they have instead.
    pub replaced: Vec<(PathBuf, String)>,
    /// Files that were left as they are, and why.
    pub left: Vec<(PathBuf, String)>,
    /// Where a damaged record was kept. Then every mask was [opened](crate::open), since what was found is not known.
    pub damaged: Option<PathBuf>,
}

/// Why a restoration is not complete.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// Kernel files could not be put back; the rest is restored and the record kept for another try.
    #[error("could not put back {}; run `hint-agent restore` again", list(.0))]
    Files(Vec<(PathBuf, String, io::Error)>),
    /// The state directory can't be used.
    #[error("can't {action} {path}, where --state-dir must be writable")]
    State {
        /// What was tried.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// The record is damaged.
    #[error("{path} is no restore record")]
    Record {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: serde_json::Error,
    },
}

fn list(failed: &[(PathBuf, String, io::Error)]) -> String {
    let parts: Vec<String> = failed
        .iter()
        .map(|(path, text, error)| format!("{:?} in {} ({error})", text.trim(), path.display()))
        .collect();
    parts.join(", ")
}

/// The agent's directory for what must outlive it.
#[derive(Debug, Clone)]
pub struct StateDir(PathBuf);

impl StateDir {
    /// The directory `path`; made when something is written.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }

    /// The directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// The restore record.
    #[must_use]
    pub fn record(&self) -> PathBuf {
        self.0.join("restore.json")
    }

    /// The CPUs to use while folded, as a CPU list: for programs that size or place themselves.
    #[must_use]
    pub fn preferred(&self) -> PathBuf {
        self.0.join("preferred")
    }

    /// Puts the record on disk in one step.
    ///
    /// # Errors
    /// When the directory can't be made or written.
    pub fn save(&self, record: &Record) -> Result<(), RestoreError> {
        let text = serde_json::to_string(record).map_err(|source| RestoreError::Record {
            path: self.record(),
            source,
        })?;
        self.replace(&self.record(), &text)
    }

    /// The record on disk; `None` when nothing is to be restored.
    ///
    /// # Errors
    /// When it can't be read or is damaged.
    pub fn load(&self) -> Result<Option<Record>, RestoreError> {
        let path = self.record();
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(error) if is_gone(&error) => return Ok(None),
            Err(source) => return Err(state("read", &path, source)),
        };
        serde_json::from_slice(&text)
            .map(Some)
            .map_err(|source| RestoreError::Record { path, source })
    }

    /// Keeps a damaged record aside, in place of one before it, and removes the published CPUs; gives where it is.
    ///
    /// # Errors
    /// When it can't be moved.
    pub fn set_aside(&self) -> Result<PathBuf, RestoreError> {
        let (record, aside) = (self.record(), self.0.join("restore.json.damaged"));
        fs::rename(&record, &aside).map_err(|source| state("move", &record, source))?;
        self.clear()?;
        Ok(aside)
    }

    /// The fold as JSON, for programs that want to know more.
    #[must_use]
    pub fn hint(&self) -> PathBuf {
        self.0.join("hint.json")
    }

    /// Tells other programs which CPUs to use.
    ///
    /// # Errors
    /// When the directory can't be made or written.
    pub fn publish(&self, published: &Published) -> Result<(), RestoreError> {
        let path = self.hint();
        let text = serde_json::to_string(published).map_err(|source| RestoreError::Record {
            path: path.clone(),
            source,
        })?;
        self.replace(&path, &format!("{text}\n"))?;
        self.replace(&self.preferred(), &format!("{}\n", published.preferred))
    }

    /// What [`StateDir::publish`] has published; `None` when nothing is, or it can't be read.
    #[must_use]
    pub fn published(&self) -> Option<String> {
        let text = fs::read_to_string(self.preferred()).ok()?;
        Some(text.trim().to_owned())
    }

    /// Removes record and published CPUs; missing files are no error.
    ///
    /// # Errors
    /// When a file can't be removed.
    pub fn clear(&self) -> Result<(), RestoreError> {
        for path in [self.preferred(), self.hint(), self.record()] {
            match fs::remove_file(&path) {
                Err(error) if !is_gone(&error) => return Err(state("remove", &path, error)),
                _ => {}
            }
        }
        Ok(())
    }

    fn make(&self) -> Result<(), RestoreError> {
        fs::create_dir_all(&self.0).map_err(|source| state("make", &self.0, source))
    }

    fn replace(&self, path: &Path, text: &str) -> Result<(), RestoreError> {
        self.make()?;
        let new = path.with_extension("new");
        let write = || {
            let mut file = fs::File::create(&new)?;
            file.write_all(text.as_bytes())?;
            fs::rename(&new, path)
        };
        write().map_err(|source| state("write", path, source))
    }
}

fn state(action: &'static str, path: &Path, source: io::Error) -> RestoreError {
    RestoreError::State {
        action,
        path: path.to_owned(),
        source,
    }
}

/// Puts everything in the record back and clears the state directory.
///
/// Groups that have vanished are forgotten. A file that somebody else has changed meanwhile stays as they want it.
///
/// # Errors
/// When a file can't be put back: all others are restored nevertheless, and the record stays on disk.
pub fn restore(
    files: &dyn Files,
    state: &StateDir,
    record: &Record,
) -> Result<Restored, RestoreError> {
    let mut done = Restored::default();
    let mut failed = Vec::new();
    for entry in &record.files {
        match restore_entry(files, entry) {
            Ok(Fate::Unchanged) => {}
            Ok(Fate::Written(None)) => done.files.push(entry.path.clone()),
            Ok(Fate::Written(Some(text))) => done.replaced.push((entry.path.clone(), text)),
            Ok(Fate::Left(why)) => done.left.push((entry.path.clone(), why)),
            Err(error) if is_gone(&error) => {}
            Err(error) => failed.push((entry.path.clone(), entry.found.clone(), error)),
        }
    }
    if let Some(path) = &record.enabled_cpuset
        && failed.is_empty()
    {
        if done.left.is_empty() {
            disable_cpuset(files, path, &mut done, &mut failed);
        } else {
            let why = "somebody uses the cpuset controller now: it stays enabled".to_owned();
            done.left.push((path.clone(), why));
        }
    }
    if !failed.is_empty() {
        return Err(RestoreError::Files(failed));
    }
    state.clear()?;
    Ok(done)
}

/// Restores from the record on disk, if there is one. When it is damaged, every mask is opened instead, so that no guest stays folded
/// until somebody looks at it, and the record is kept aside.
///
/// # Errors
/// As [`restore`], and when the record can't be read or kept aside.
pub fn restore_left_over(
    files: &dyn Files,
    state: &StateDir,
) -> Result<Option<Restored>, RestoreError> {
    let record = match state.load() {
        Ok(Some(record)) => record,
        Ok(None) => return Ok(None),
        Err(RestoreError::Record { .. }) => {
            let opened = open_all(files)?;
            let damaged = Some(state.set_aside()?);
            return Ok(Some(Restored { damaged, ..opened }));
        }
        Err(error) => return Err(error),
    };
    // Where one of the two is not known the boots may be the same: restoring too much does less harm than staying folded.
    if let (Some(then), Some(now)) = (&record.boot_id, system::boot_id(files))
        && *then != now
    {
        state.clear()?;
        return Ok(None);
    }
    restore(files, state, &record).map(Some)
}

/// What became of one file.
enum Fate {
    Unchanged,
    /// With the text that the kernel took instead of the one that was found.
    Written(Option<String>),
    Left(String),
}

fn restore_entry(files: &dyn Files, entry: &Entry) -> io::Result<Fate> {
    let current = files.read(&entry.path)?;
    if current == entry.found {
        return Ok(Fate::Unchanged);
    }
    if entry.shared && entry.author(&current) == Author::Other {
        let text = current.trim();
        return Ok(Fate::Left(format!(
            "somebody else has written {text:?} meanwhile: it stays"
        )));
    }
    put_back(files, &entry.path, &entry.found, &entry.instead).map(Fate::Written)
}

/// Writes `text`, or the first of `instead` that the kernel takes when it refuses `text`; gives the latter.
///
/// # Errors
/// The kernel's first one.
pub fn put_back(
    files: &dyn Files,
    path: &Path,
    text: &str,
    instead: &[String],
) -> io::Result<Option<String>> {
    let Err(error) = files.write(path, writable_text(text)) else {
        return Ok(None);
    };
    let refused = matches!(
        error.kind(),
        io::ErrorKind::InvalidInput | io::ErrorKind::StorageFull
    );
    if refused
        && let Some(taken) = instead
            .iter()
            .find(|text| files.write(path, writable_text(text)).is_ok())
    {
        return Ok(Some(taken.trim().to_owned()));
    }
    Err(error)
}

fn disable_cpuset(
    files: &dyn Files,
    path: &Path,
    done: &mut Restored,
    failed: &mut Vec<(PathBuf, String, io::Error)>,
) {
    let enabled = match files.read(path) {
        Ok(text) => text.split_ascii_whitespace().any(|name| name == "cpuset"),
        Err(error) => {
            if !is_gone(&error) {
                failed.push((path.to_owned(), "-cpuset".to_owned(), error));
            }
            return;
        }
    };
    if !enabled {
        return;
    }
    match files.write(path, "-cpuset") {
        Ok(()) => {
            // The groups' files are gone with the controller, whatever text they had.
            done.files
                .extend(done.replaced.drain(..).map(|(path, _)| path));
            done.files.push(path.to_owned());
        }
        Err(error) if error.kind() == io::ErrorKind::ResourceBusy => done.left.push((
            path.to_owned(),
            "a group below uses the cpuset controller now: it stays enabled".to_owned(),
        )),
        Err(error) => failed.push((path.to_owned(), "-cpuset".to_owned(), error)),
    }
}
