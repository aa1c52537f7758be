//! What a guest shall be.

use std::path::PathBuf;

use crate::assets::{self, Kernel};

use super::GuestError;

/// What a guest shall be. Start from [`GuestSpec::named`] and change what matters.
#[derive(Debug, Clone)]
pub struct GuestSpec {
    /// Name of the guest: letters, digits and `-`, at most 32. Tests that run at once may use the same one.
    pub name: String,
    /// The kernel that it boots; by default Debian's.
    pub kernel: Kernel,
    /// vCPUs, 1 to 255 (64 with [`Kernel::Paravirt`]); the default is 4.
    pub vcpus: u32,
    /// Memory in MiB; the default is 512.
    pub memory_mib: u32,
    /// How the vCPUs are arranged; by default each is a socket.
    pub topology: Option<Topology>,
    /// NUMA nodes, among which vCPUs and memory are divided evenly; the default is 1.
    pub numa_nodes: u32,
    /// vCPUs of each node, which may be 0, where they are not divided evenly. Empty: evenly.
    pub node_vcpus: Vec<u32>,
    /// The agent to put in and to start; by default none.
    pub agent: Option<AgentSpec>,
    /// Debian with systemd in place of busybox; `agent` is then put at /usr/sbin and its service is there, but not started, and there is
    /// no work. It takes 1 GiB of memory.
    pub systemd: bool,
    /// More programs of the host to put into /usr/bin, by name or path, with the shared libraries that they need.
    pub programs: Vec<String>,
    /// More kernel modules, which only [`Kernel::Debian`] has, each after those it needs: paths below `kernel/` of the module folder, without `.ko.xz`.
    pub modules: Vec<String>,
    /// More files: where each is on the host, and where in the guest.
    pub files: Vec<(PathBuf, PathBuf)>,
    /// More words of the kernel's command line.
    pub kernel_args: Vec<String>,
    /// More arguments of QEMU.
    pub qemu_args: Vec<String>,
}

/// Sockets, cores a socket, threads a core. Their product is the number of vCPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Topology {
    /// Sockets.
    pub sockets: u32,
    /// Cores of each socket.
    pub cores: u32,
    /// Hardware threads of each core.
    pub threads: u32,
}

/// The agent of a guest.
#[derive(Debug, Clone, Default)]
pub struct AgentSpec {
    /// Its arguments.
    pub args: Vec<String>,
    /// The static binary; by default [`assets::agent`] finds or builds it.
    pub binary: Option<PathBuf>,
}

impl GuestSpec {
    /// A guest with 4 vCPUs, 512 MiB and no agent.
    #[must_use]
    pub fn named(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            kernel: Kernel::default(),
            vcpus: 4,
            memory_mib: 512,
            topology: None,
            numa_nodes: 1,
            node_vcpus: Vec::new(),
            agent: None,
            systemd: false,
            programs: Vec::new(),
            modules: Vec::new(),
            files: Vec::new(),
            kernel_args: Vec::new(),
            qemu_args: Vec::new(),
        }
    }

    /// The same guest with another kernel.
    #[must_use]
    pub fn with_kernel(mut self, kernel: Kernel) -> Self {
        self.kernel = kernel;
        self
    }

    /// The same guest with an agent that starts with these arguments.
    #[must_use]
    pub fn with_agent(mut self, args: &[&str]) -> Self {
        self.agent = Some(AgentSpec {
            args: args.iter().map(|&arg| arg.to_owned()).collect(),
            binary: None,
        });
        self
    }

    pub(super) fn check(&self) -> Result<(), GuestError> {
        let wrong = |expected, found| {
            Err(GuestError::Spec {
                guest: self.name.clone(),
                expected,
                found,
            })
        };
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '-';
        if !(1..=32).contains(&self.name.len()) || !self.name.chars().all(plain) {
            return wrong(
                "a name of 1 to 32 letters, digits and '-'",
                self.name.clone(),
            );
        }
        if !(1..=255).contains(&self.vcpus) {
            return wrong("1 to 255 vCPUs", self.vcpus.to_string());
        }
        if self.kernel == Kernel::Paravirt && self.vcpus > 64 {
            return wrong(
                "at most 64 vCPUs with the lab's own kernel",
                self.vcpus.to_string(),
            );
        }
        if self.kernel == Kernel::Paravirt && !self.modules.is_empty() {
            return wrong(
                "no modules with the lab's own kernel",
                self.modules.join(", "),
            );
        }
        if self.memory_mib < 128 {
            return wrong("at least 128 MiB of memory", self.memory_mib.to_string());
        }
        let divides = |total: u32| self.numa_nodes > 0 && total.is_multiple_of(self.numa_nodes);
        let nodes_add_up = if self.node_vcpus.is_empty() {
            divides(self.vcpus)
        } else {
            self.node_vcpus.len() == self.numa_nodes as usize
                && self.node_vcpus.iter().sum::<u32>() == self.vcpus
        };
        if !nodes_add_up || !divides(self.memory_mib) {
            let found = format!(
                "{} nodes for {} vCPUs and {} MiB",
                self.numa_nodes, self.vcpus, self.memory_mib
            );
            return wrong(
                "NUMA nodes that divide vCPUs and memory evenly, or as node_vcpus says",
                found,
            );
        }
        if let Some(Topology {
            sockets,
            cores,
            threads,
        }) = self.topology
            && u64::from(sockets) * u64::from(cores) * u64::from(threads) != u64::from(self.vcpus)
        {
            let found = format!("{sockets} x {cores} x {threads} for {} vCPUs", self.vcpus);
            return wrong("a topology with as many threads as vCPUs", found);
        }
        Ok(())
    }

    pub(super) fn agent_binary(&self) -> Result<Option<PathBuf>, GuestError> {
        match &self.agent {
            None => Ok(None),
            Some(AgentSpec {
                binary: Some(binary),
                ..
            }) => Ok(Some(binary.clone())),
            Some(AgentSpec { binary: None, .. }) => Ok(Some(assets::agent()?)),
        }
    }

    pub(super) fn programs(&self) -> Result<Vec<PathBuf>, GuestError> {
        self.programs
            .iter()
            .map(|name| assets::program(name).map_err(GuestError::from))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_guests_are_refused() {
        let good = GuestSpec::named("good");
        good.check().unwrap();
        let topology = |sockets, cores, threads| {
            Some(Topology {
                sockets,
                cores,
                threads,
            })
        };
        let bad = [
            GuestSpec {
                name: "a,b".to_owned(),
                ..good.clone()
            },
            GuestSpec {
                name: String::new(),
                ..good.clone()
            },
            GuestSpec {
                vcpus: 0,
                ..good.clone()
            },
            GuestSpec {
                vcpus: 256,
                ..good.clone()
            },
            GuestSpec {
                vcpus: 65,
                kernel: Kernel::Paravirt,
                ..good.clone()
            },
            GuestSpec {
                modules: vec!["drivers/block/loop".to_owned()],
                kernel: Kernel::Paravirt,
                ..good.clone()
            },
            GuestSpec {
                memory_mib: 64,
                ..good.clone()
            },
            GuestSpec {
                numa_nodes: 0,
                ..good.clone()
            },
            GuestSpec {
                numa_nodes: 3,
                ..good.clone()
            },
            GuestSpec {
                numa_nodes: 2,
                node_vcpus: vec![1, 2],
                ..good.clone()
            },
            GuestSpec {
                topology: topology(1, 4, 2),
                ..good.clone()
            },
        ];
        for spec in bad {
            assert!(
                matches!(spec.check(), Err(GuestError::Spec { .. })),
                "{spec:?}"
            );
        }
        GuestSpec {
            numa_nodes: 2,
            topology: topology(1, 2, 2),
            ..good
        }
        .check()
        .unwrap();
    }
}
