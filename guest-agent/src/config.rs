//! The agent's settings: built-in values, then `/etc/hint-agent.toml`, then the command line.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::apply::Choice;
use crate::session::{Endpoint, ParseEndpointError};

/// The configuration that is read when it exists and no other is named.
pub const DEFAULT_PATH: &str = "/etc/hint-agent.toml";
/// The state directory when none is named.
pub const DEFAULT_STATE_DIR: &str = "/run/hint-agent";

/// Why the settings can't be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file can't be read.
    #[error("can't read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// The file is not TOML, or has an unknown key or a wrong value; the source names the line.
    #[error("the configuration {path} is not right")]
    Parse {
        /// The file.
        path: PathBuf,
        /// What is wrong and where.
        source: Box<toml::de::Error>,
    },
    /// The endpoint is none.
    #[error("the endpoint in {path} is none")]
    Endpoint {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: ParseEndpointError,
    },
}

/// Settings from one place; `None` leaves the others' value.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Overrides {
    /// Where the broker listens.
    pub endpoint: Option<Endpoint>,
    /// Which actuator to use.
    pub actuator: Option<Choice>,
    /// The state directory.
    pub state_dir: Option<PathBuf>,
}

/// The settings in force.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Where the broker listens.
    pub endpoint: Endpoint,
    /// Which actuator to use.
    pub actuator: Choice,
    /// Where the restore record is kept.
    pub state_dir: PathBuf,
    /// May cpuset be used on a kernel before 6.2, which loses the affinity of pinned tasks for good?
    pub allow_old_kernel: bool,
}

/// The keys of the file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    endpoint: Option<String>,
    actuator: Option<Choice>,
    state_dir: Option<PathBuf>,
    #[serde(default)]
    allow_old_kernel: bool,
}

impl Config {
    /// Reads the file at `path`, or at [`DEFAULT_PATH`] if there is one there, and lays `flags` over it.
    ///
    /// # Errors
    /// When a file is not readable or not right, or a named one is missing.
    pub fn load(path: Option<&Path>, flags: Overrides) -> Result<Self, ConfigError> {
        let (path, required) = match path {
            Some(path) => (path, true),
            None => (Path::new(DEFAULT_PATH), false),
        };
        let text = match fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound && !required => String::new(),
            Err(source) => {
                return Err(ConfigError::Read {
                    path: path.to_owned(),
                    source,
                });
            }
        };
        Self::parse(&text, path, flags)
    }

    /// The state directory that a file names which is not right otherwise; the usual one where it names none. `None` when the file
    /// can't be read or is no TOML.
    #[must_use]
    pub fn state_dir_of_refused(path: Option<&Path>) -> Option<PathBuf> {
        let text = fs::read_to_string(path.unwrap_or(Path::new(DEFAULT_PATH))).ok()?;
        let table: toml::Table = text.parse().ok()?;
        match table.get("state_dir") {
            None => Some(DEFAULT_STATE_DIR.into()),
            Some(dir) => dir.as_str().map(PathBuf::from),
        }
    }

    /// Reads a text and lays `flags` over it; `path` is for the message.
    ///
    /// # Errors
    /// When the text is not right.
    pub fn parse(text: &str, path: &Path, flags: Overrides) -> Result<Self, ConfigError> {
        let file: File = toml::from_str(text).map_err(|source| ConfigError::Parse {
            path: path.to_owned(),
            source: Box::new(source),
        })?;
        let endpoint = match file.endpoint.map(|text| text.parse()) {
            Some(Err(source)) => {
                return Err(ConfigError::Endpoint {
                    path: path.to_owned(),
                    source,
                });
            }
            Some(Ok(endpoint)) => Some(endpoint),
            None => None,
        };
        Ok(Self {
            endpoint: flags.endpoint.or(endpoint).unwrap_or_default(),
            actuator: flags.actuator.or(file.actuator).unwrap_or_default(),
            state_dir: flags
                .state_dir
                .or(file.state_dir)
                .unwrap_or_else(|| DEFAULT_STATE_DIR.into()),
            allow_old_kernel: file.allow_old_kernel,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::chain;

    fn load(text: &str, flags: Overrides) -> Result<Config, ConfigError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("agent.toml");
        fs::write(&path, text).unwrap();
        Config::load(Some(&path), flags)
    }

    #[test]
    fn flags_go_over_the_file_and_the_file_over_the_built_in_values() {
        let config = load("", Overrides::default()).unwrap();
        assert_eq!(
            config,
            Config {
                endpoint: Endpoint::Vsock { cid: 2, port: 737 },
                actuator: Choice::Auto,
                state_dir: "/run/hint-agent".into(),
                allow_old_kernel: false,
            }
        );
        let text = "endpoint = \"unix:/a\"\nactuator = \"cpuset\"\nallow_old_kernel = true\n";
        let config = load(text, Overrides::default()).unwrap();
        assert_eq!(config.endpoint, Endpoint::Unix("/a".into()));
        assert_eq!(config.actuator, Choice::Cpuset);
        assert!(config.allow_old_kernel);
        let flags = Overrides {
            endpoint: Some(Endpoint::Unix("/b".into())),
            actuator: Some(Choice::Observe),
            state_dir: Some("/s".into()),
        };
        let config = load(text, flags).unwrap();
        assert_eq!(config.endpoint, Endpoint::Unix("/b".into()));
        assert_eq!(config.actuator, Choice::Observe);
        assert_eq!(config.state_dir, PathBuf::from("/s"));
    }

    #[test]
    fn mistakes_are_named_with_their_place() {
        for (text, says) in [
            ("\nendpiont = \"unix:/a\"\n", ["line 2", "endpiont"]),
            ("actuator = \"hotplug\"\n", ["line 1", "hotplug"]),
            ("endpoint = \"tcp:1\"\n", ["endpoint", "tcp:1"]),
        ] {
            let error = chain(&load(text, Overrides::default()).unwrap_err());
            for part in says {
                assert!(error.contains(part), "{error}");
            }
        }
        let error = Config::load(Some(Path::new("/nowhere/agent.toml")), Overrides::default());
        assert!(
            error
                .unwrap_err()
                .to_string()
                .contains("/nowhere/agent.toml")
        );
    }
}
