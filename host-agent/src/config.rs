//! The daemon's TOML configuration. Every key has a default, so an empty file is a valid one; unknown keys and values out of
//! range are refused with their line.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Deserializer, de};

use crate::model::{Mode, Vm};

/// Where the daemon looks when no file is named.
pub const DEFAULT_PATH: &str = "/etc/hint-broker.toml";

/// The whole configuration.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// How far to go with every VM; a `[[vm]]` can go less far, never further.
    pub mode: Mode,
    /// Finding VMs.
    pub discover: Discover,
    /// Measuring.
    pub observe: Observe,
    /// The host's own work, as a claimant beside the VMs.
    pub host: Host,
    /// The channel to the guests.
    pub channel: Channel,
    /// The control API.
    pub control: Control,
    /// The metrics endpoint.
    pub metrics: Metrics,
    /// The recording.
    pub record: Record,
    /// Exceptions for single VMs; the first that fits counts.
    #[serde(rename = "vm")]
    pub vms: Vec<VmPolicy>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            mode: Mode::Observe,
            discover: Discover::default(),
            observe: Observe::default(),
            host: Host::default(),
            channel: Channel::default(),
            control: Control::default(),
            metrics: Metrics::default(),
            record: Record::default(),
            vms: Vec::new(),
        }
    }
}

/// `[discover]`
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Discover {
    /// Count QEMU guests without KVM too.
    pub tcg: bool,
    /// How often to look for new VMs, in milliseconds, 100 to 60 000.
    #[serde(rename = "rescan_ms", deserialize_with = "rescan")]
    pub rescan: Duration,
}

impl Default for Discover {
    fn default() -> Self {
        Self {
            tcg: false,
            rescan: Duration::from_secs(1),
        }
    }
}

/// `[observe]`
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Observe {
    /// How often to measure and decide, in milliseconds, 50 to 1000.
    #[serde(rename = "interval_ms", deserialize_with = "interval")]
    pub interval: Duration,
}

impl Default for Observe {
    fn default() -> Self {
        Self {
            interval: Duration::from_millis(100),
        }
    }
}

/// `[host]`
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Host {
    /// Weight of all work outside the VMs, as that of one VM; 1 to 10 000.
    #[serde(deserialize_with = "weight")]
    pub weight: u32,
}

impl Default for Host {
    fn default() -> Self {
        Self {
            weight: DEFAULT_WEIGHT,
        }
    }
}

/// `[channel]`
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Channel {
    /// Listen on the host's AF_VSOCK for guests with a CID.
    pub vsock: bool,
    /// Port for both kinds of vsock, 1 to 1023, so that only root of the host can listen there.
    #[serde(deserialize_with = "port")]
    pub port: u32,
    /// How often each side says something, in milliseconds, 100 to 10 000.
    #[serde(rename = "heartbeat_ms", deserialize_with = "heartbeat")]
    pub heartbeat: Duration,
    /// How long a hint holds without renewal, in milliseconds, 500 to 60 000 and at least twice the heartbeat.
    #[serde(rename = "lease_ms", deserialize_with = "lease")]
    pub lease: Duration,
}

impl Default for Channel {
    fn default() -> Self {
        Self {
            vsock: true,
            port: hint_proto::GUEST_PORT,
            heartbeat: Duration::from_secs(1),
            lease: Duration::from_secs(5),
        }
    }
}

/// `[control]`
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Control {
    /// Unix socket of the control API.
    pub socket: PathBuf,
}

impl Default for Control {
    fn default() -> Self {
        Self {
            socket: PathBuf::from("/run/hint-broker/control.sock"),
        }
    }
}

/// `[metrics]`
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Metrics {
    /// Serve metrics at all.
    pub enabled: bool,
    /// Address and port.
    pub listen: SocketAddr,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            enabled: true,
            listen: SocketAddr::from(([127, 0, 0, 1], 9737)),
        }
    }
}

/// `[record]`
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Record {
    /// File to record to, beside its older half with `.old` behind the name; nothing is recorded without.
    pub path: Option<PathBuf>,
    /// Size of both together in MiB, 1 to 1 048 576.
    #[serde(rename = "max_mib", deserialize_with = "mib")]
    pub most: u64,
}

impl Default for Record {
    fn default() -> Self {
        Self {
            path: None,
            most: 64 << 20,
        }
    }
}

/// Weight of a VM that the configuration doesn't name.
pub const DEFAULT_WEIGHT: u32 = 100;

/// `[[vm]]`: what holds for one VM, or for all VMs of one name.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmPolicy {
    /// Fits VMs of this name.
    pub name: Option<String>,
    /// Fits the VM of this UUID.
    pub uuid: Option<String>,
    /// How far to go with it at most.
    #[serde(default = "furthest")]
    pub mode: Mode,
    /// Its weight among its siblings in place of its CPU group's, 1 to 10 000.
    #[serde(default, deserialize_with = "weight_or_none")]
    pub weight: Option<u32>,
    /// Never fewer usable vCPUs than this; 1 or more.
    #[serde(default = "one", deserialize_with = "at_least_one")]
    pub min_usable: u32,
    /// Never more usable vCPUs than this, contended or not; 1 or more.
    #[serde(default, deserialize_with = "at_least_one_or_none")]
    pub max_usable: Option<u32>,
    /// Always so many usable vCPUs; 1 or more.
    #[serde(default, deserialize_with = "at_least_one_or_none")]
    pub usable: Option<u32>,
    /// pCPU time that it is due while it wants it, whatever the weights say; in CPUs, 0 for none. The broker's figure only: give
    /// the VM's cgroup the weight that keeps the promise.
    #[serde(default, deserialize_with = "reservation")]
    pub reservation: f64,
    /// Path of its hybrid vsock, for a VMM whose command line doesn't tell.
    pub hybrid_socket: Option<PathBuf>,
}

impl Default for VmPolicy {
    fn default() -> Self {
        Self {
            name: None,
            uuid: None,
            mode: furthest(),
            weight: None,
            min_usable: 1,
            max_usable: None,
            usable: None,
            reservation: 0.0,
            hybrid_socket: None,
        }
    }
}

impl VmPolicy {
    /// Whether it is for that VM.
    #[must_use]
    pub fn fits(&self, vm: &Vm) -> bool {
        let uuid = |wanted: &String| {
            vm.uuid
                .as_ref()
                .is_some_and(|uuid| digits(uuid) == digits(wanted))
        };
        self.uuid.as_ref().is_none_or(uuid)
            && self.name.as_ref().is_none_or(|name| *name == vm.name)
    }

    /// Whether every VM that the other one fits is one of this one's.
    fn covers(&self, other: &Self) -> bool {
        let name = |name| other.name.as_ref() == Some(name);
        let uuid = |uuid: &String| {
            let other = other.uuid.as_deref();
            other.is_some_and(|other| digits(other) == digits(uuid))
        };
        self.name.as_ref().is_none_or(name) && self.uuid.as_ref().is_none_or(uuid)
    }
}

/// A UUID's digits, in which all its ways of writing agree.
fn digits(uuid: &str) -> String {
    uuid.replace('-', "").to_ascii_lowercase()
}

fn is_uuid(text: &str) -> bool {
    let digits = digits(text);
    digits.len() == 32 && digits.bytes().all(|byte| byte.is_ascii_hexdigit())
}

fn furthest() -> Mode {
    Mode::Enforce
}

fn one() -> u32 {
    1
}

/// Why a configuration is refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file can't be read.
    #[error("can't read the configuration {path}: {source}; name another, or make it readable")]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The text is not a valid configuration.
    #[error("the configuration {path} is refused: {message}")]
    Refused {
        /// The file.
        path: PathBuf,
        /// Line, key and what was expected.
        message: String,
    },
}

impl Config {
    /// Reads a file; `None` reads [`DEFAULT_PATH`] where it exists and gives the defaults where not.
    ///
    /// # Errors
    /// When the file can't be read, a key is unknown or a value is out of range.
    pub fn load(path: Option<&Path>) -> Result<Self, ConfigError> {
        let (path, optional) = match path {
            Some(path) => (path, false),
            None => (Path::new(DEFAULT_PATH), true),
        };
        match std::fs::read_to_string(path) {
            Ok(text) => Self::parse(&text, path),
            Err(error) if optional && error.kind() == std::io::ErrorKind::NotFound => {
                Ok(Self::default())
            }
            Err(source) => Err(ConfigError::Read {
                path: path.to_owned(),
                source,
            }),
        }
    }

    /// Reads a text; `path` is for the message.
    ///
    /// # Errors
    /// When a key is unknown or a value is out of range.
    pub fn parse(text: &str, path: &Path) -> Result<Self, ConfigError> {
        let refused = |message: String| ConfigError::Refused {
            path: path.to_owned(),
            message,
        };
        let config: Self = toml::from_str(text).map_err(|error| refused(error.to_string()))?;
        if config.channel.lease < 2 * config.channel.heartbeat {
            return Err(refused(format!(
                "[channel] lease_ms = {} must be at least twice heartbeat_ms = {}, so that one lost heartbeat does no harm",
                config.channel.lease.as_millis(),
                config.channel.heartbeat.as_millis()
            )));
        }
        for (index, vm) in config.vms.iter().enumerate() {
            if vm.max_usable.is_some_and(|most| most < vm.min_usable) {
                return Err(refused(format!(
                    "[[vm]] number {}: max_usable must be min_usable or more",
                    index + 1
                )));
            }
            let within = |usable: u32| {
                usable >= vm.min_usable && vm.max_usable.is_none_or(|most| usable <= most)
            };
            if vm.usable.is_some_and(|usable| !within(usable)) {
                return Err(refused(format!(
                    "[[vm]] number {}: usable must be min_usable or more, and max_usable or less; leave those out, since usable fixes it",
                    index + 1
                )));
            }
            if vm.name.is_none() && vm.uuid.is_none() {
                return Err(refused(format!(
                    "[[vm]] number {} needs a name or a uuid to say which VM it is for",
                    index + 1
                )));
            }
            if let Some(uuid) = vm.uuid.as_deref().filter(|uuid| !is_uuid(uuid)) {
                return Err(refused(format!(
                    "[[vm]] number {}: uuid must have 32 hexadecimal digits, with or without '-', found {uuid:?}",
                    index + 1
                )));
            }
            if let Some(first) = config.vms[..index]
                .iter()
                .position(|first| first.covers(vm))
            {
                return Err(refused(format!(
                    "[[vm]] number {} would never hold, since number {} comes first and is for all of its VMs; leave one out, or put the one with a uuid first",
                    index + 1,
                    first + 1
                )));
            }
        }
        Ok(config)
    }

    /// What holds for a VM.
    #[must_use]
    pub fn policy(&self, vm: &Vm) -> VmPolicy {
        let mut policy = self
            .vms
            .iter()
            .find(|policy| policy.fits(vm))
            .cloned()
            .unwrap_or_default();
        policy.mode = policy.mode.min(self.mode);
        policy
    }
}

fn within<'de, D: Deserializer<'de>>(
    deserializer: D,
    least: u64,
    most: u64,
) -> Result<u64, D::Error> {
    let found = i64::deserialize(deserializer)?;
    u64::try_from(found)
        .ok()
        .filter(|value| (least..=most).contains(value))
        .ok_or_else(|| {
            de::Error::custom(format!(
                "expected a whole number from {least} to {most}, found {found}"
            ))
        })
}

fn within_u32<'de, D: Deserializer<'de>>(
    deserializer: D,
    least: u32,
    most: u32,
) -> Result<u32, D::Error> {
    let value = within(deserializer, u64::from(least), u64::from(most))?;
    Ok(u32::try_from(value).expect("within the u32 range given"))
}

fn rescan<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    within(deserializer, 100, 60_000).map(Duration::from_millis)
}

fn interval<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    within(deserializer, 50, 1000).map(Duration::from_millis)
}

fn heartbeat<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    within(deserializer, 100, 10_000).map(Duration::from_millis)
}

fn lease<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    within(deserializer, 500, 60_000).map(Duration::from_millis)
}

fn mib<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    within(deserializer, 1, 1 << 20).map(|mib| mib << 20)
}

fn port<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    within_u32(deserializer, 1, 1023)
}

fn weight<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    within_u32(deserializer, 1, 10_000)
}

fn at_least_one<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    within_u32(deserializer, 1, hint_proto::MAX_CPUS)
}

fn weight_or_none<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u32>, D::Error> {
    weight(deserializer).map(Some)
}

fn at_least_one_or_none<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<u32>, D::Error> {
    at_least_one(deserializer).map(Some)
}

fn reservation<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    let found = f64::deserialize(deserializer)?;
    let most = f64::from(hint_proto::MAX_CPUS);
    if (0.0..=most).contains(&found) {
        Ok(found)
    } else {
        Err(de::Error::custom(format!(
            "expected a number of CPUs from 0 to {most}, found {found}"
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Accelerator, Vcpus, VmId};

    fn parse(text: &str) -> Result<Config, String> {
        Config::parse(text, Path::new("/etc/hint-broker.toml")).map_err(|error| error.to_string())
    }

    fn vm(name: &str) -> Vm {
        Vm {
            id: VmId {
                pid: 1,
                start_ticks: 2,
            },
            name: name.to_owned(),
            uuid: Some("11111111-2222-3333-4444-555555555555".to_owned()),
            accelerator: Accelerator::Kvm,
            vcpus: Vcpus::Unclassified("a test".to_owned()),
            cid: None,
            hybrid_socket: None,
        }
    }

    #[test]
    fn an_empty_file_observes_only() {
        let config = parse("").unwrap();
        assert_eq!(config, Config::default());
        assert_eq!(config.mode, Mode::Observe);
        assert!(!config.discover.tcg);
    }

    #[test]
    fn unknown_keys_are_refused_with_their_line() {
        let error = parse("mode = \"enforce\"\n\n[channel]\nlease = 3\n").unwrap_err();
        assert!(error.contains("line 4"), "{error}");
        assert!(error.contains("lease"), "{error}");
        let error = parse("mod = \"enforce\"\n").unwrap_err();
        assert!(error.contains("line 1") && error.contains("mod"), "{error}");
        let error = parse("[[vm]]\nname = \"a\"\nwieght = 3\n").unwrap_err();
        assert!(
            error.contains("line 3") && error.contains("wieght"),
            "{error}"
        );
    }

    #[test]
    fn values_out_of_range_are_refused_with_line_and_range() {
        for (text, line, says) in [
            (
                "[observe]\ninterval_ms = 5\n",
                2,
                "from 50 to 1000, found 5",
            ),
            (
                "[channel]\n\nport = 5000\n",
                3,
                "from 1 to 1023, found 5000",
            ),
            ("[host]\nweight = 0\n", 2, "from 1 to 10000, found 0"),
            ("[[vm]]\nname = \"a\"\nweight = -7\n", 3, "found -7"),
            ("[[vm]]\nname = \"a\"\nmin_usable = 0\n", 3, "found 0"),
            (
                "[metrics]\nlisten = \"nowhere\"\n",
                2,
                "invalid socket address",
            ),
            ("mode = \"on\"\n", 1, "observe"),
            ("[discover]\nrescan_ms = nan\n", 2, "invalid type"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(
                error.contains(&format!("line {line}")) && error.contains(says),
                "{text:?}: {error}"
            );
        }
    }

    #[test]
    fn a_lease_must_outlast_two_heartbeats() {
        let error = parse("[channel]\nheartbeat_ms = 1000\nlease_ms = 1500\n").unwrap_err();
        assert!(error.contains("lease_ms = 1500"), "{error}");
    }

    #[test]
    fn a_vm_section_must_say_which_vm() {
        let error = parse("[[vm]]\nweight = 3\n").unwrap_err();
        assert!(error.contains("needs a name or a uuid"), "{error}");
    }

    #[test]
    fn a_section_that_could_never_hold_is_refused() {
        let uuid = "11111111-2222-3333-4444-55555555555A";
        for (text, wanted) in [
            (
                "[[vm]]\nuuid = \"xyz\"\n".to_owned(),
                "32 hexadecimal digits",
            ),
            (
                "[[vm]]\nname = \"a\"\nusable = 2\nmin_usable = 3\n".to_owned(),
                "usable must be",
            ),
            (
                "[[vm]]\nname = \"a\"\nusable = 2\nmax_usable = 1\n".to_owned(),
                "usable must be",
            ),
            (
                "[[vm]]\nname = \"a\"\n[[vm]]\nname = \"a\"\n".to_owned(),
                "number 1 comes first",
            ),
            (
                format!("[[vm]]\nname = \"a\"\n[[vm]]\nname = \"a\"\nuuid = \"{uuid}\"\n"),
                "put the one with a uuid first",
            ),
            (
                format!(
                    "[[vm]]\nuuid = \"{uuid}\"\n[[vm]]\nuuid = \"{}\"\n",
                    uuid.replace('-', "").to_lowercase()
                ),
                "number 2 would never hold",
            ),
        ] {
            let error = parse(&text).unwrap_err();
            assert!(error.contains(wanted), "{error}");
        }
        let narrow_first = format!(
            "[[vm]]\nname = \"a\"\nuuid = \"{uuid}\"\nmode = \"observe\"\n[[vm]]\nname = \"a\"\n"
        );
        parse(&narrow_first).unwrap();
    }

    #[test]
    fn a_uuid_fits_however_it_is_written() {
        let uuid = "11111111-2222-3333-4444-55555555555a";
        let vm = Vm {
            uuid: Some(uuid.to_owned()),
            ..vm("db")
        };
        for written in [uuid.to_uppercase(), uuid.replace('-', "")] {
            let config = parse(&format!(
                "[[vm]]\nuuid = \"{written}\"\nmode = \"observe\"\n"
            ))
            .unwrap();
            assert_eq!(config.policy(&vm).mode, Mode::Observe, "{written}");
        }
    }

    #[test]
    fn a_vm_never_goes_further_than_the_host() {
        let config = parse("mode = \"advise\"\n[[vm]]\nname = \"a\"\nweight = 300\n[[vm]]\nname = \"b\"\nmode = \"observe\"\n").unwrap();
        assert_eq!(config.policy(&vm("a")).mode, Mode::Advise);
        assert_eq!(config.policy(&vm("a")).weight, Some(300));
        assert_eq!(config.policy(&vm("b")).mode, Mode::Observe);
        assert_eq!(config.policy(&vm("c")).weight, None);
    }

    #[test]
    fn a_missing_file_that_was_named_is_an_error() {
        let error = Config::load(Some(Path::new("/nonexistent/broker.toml")))
            .unwrap_err()
            .to_string();
        assert!(error.contains("/nonexistent/broker.toml"), "{error}");
    }
}
