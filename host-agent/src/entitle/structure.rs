//! What follows from groups and cpusets alone: the tree in walking order, pCPUs by class, claimants by the classes that they
//! may use, and the components that share no pCPU. It is built anew only when one of those changes.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use hint_proto::CpuSet;

use super::division::{Fault, FaultKind, Place};
use crate::model::{Host, Threads};

/// The part of the input that the structure depends on.
#[derive(Debug, Default, PartialEq)]
struct Key {
    pcpus: Vec<u32>,
    groups: Vec<(Option<usize>, Option<Arc<CpuSet>>)>,
    claimants: Vec<(Option<usize>, Threads)>,
}

impl Key {
    fn of(host: &Host) -> Self {
        Self {
            pcpus: host.pcpus.iter().map(|pcpu| pcpu.id).collect(),
            groups: host
                .groups
                .iter()
                .map(|group| (group.parent, group.cpus.clone()))
                .collect(),
            claimants: host
                .claimants
                .iter()
                .map(|claimant| (claimant.parent, claimant.threads.clone()))
                .collect(),
        }
    }

    fn fits(&self, host: &Host) -> bool {
        self.pcpus.len() == host.pcpus.len()
            && self.groups.len() == host.groups.len()
            && self.claimants.len() == host.claimants.len()
            && self
                .pcpus
                .iter()
                .zip(&host.pcpus)
                .all(|(id, pcpu)| *id == pcpu.id)
            && self
                .groups
                .iter()
                .zip(&host.groups)
                .all(|((parent, cpus), group)| *parent == group.parent && *cpus == group.cpus)
            && self
                .claimants
                .iter()
                .zip(&host.claimants)
                .all(|((parent, threads), claimant)| {
                    *parent == claimant.parent && *threads == claimant.threads
                })
    }
}

/// A group of the tree, or its root.
#[derive(Debug)]
pub(super) struct Branch {
    /// Its place in the input; `None` for the root.
    pub(super) group: Option<usize>,
    /// Its parent's place among the branches, which is lower than its own; the root's is itself.
    pub(super) parent: usize,
    /// Its place below the root; 0 for the root.
    pub(super) depth: usize,
    /// Places of the branches right below it.
    pub(super) branches: Vec<usize>,
    /// Places of the leaves right below it.
    pub(super) leaves: Vec<usize>,
}

/// A claimant that takes part.
#[derive(Debug)]
pub(super) struct Leaf {
    /// Its place in the input.
    pub(super) claimant: usize,
    /// Its branch.
    pub(super) branch: usize,
    /// Its node.
    pub(super) node: usize,
    /// Its threads that have pCPUs.
    pub(super) threads: f64,
}

/// Leaves of one node and one branch, which lie side by side.
#[derive(Debug)]
pub(super) struct Bucket {
    pub(super) branch: usize,
    pub(super) leaves: Range<usize>,
}

/// Claimants that are one to the flow of time from pCPUs to threads: all whose threads may use the same classes, or a single
/// claimant with threads of different kinds.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) component: usize,
    pub(super) leaves: Range<usize>,
    pub(super) buckets: Range<usize>,
    pub(super) strands: Range<usize>,
    /// May two of its strands use the same class?
    pub(super) overlaps: bool,
}

/// Threads of a node that may use the same classes.
#[derive(Debug)]
pub(super) struct Strand {
    pub(super) node: usize,
    /// How many threads; infinite where the node's claimants are limited by their threads anyway.
    pub(super) threads: f64,
    pub(super) arcs: Range<usize>,
}

/// pCPUs that the same strands may use.
#[derive(Debug)]
pub(super) struct PcpuClass {
    /// Places in the input.
    pub(super) pcpus: Vec<usize>,
    /// Arcs that end here.
    pub(super) arcs: Vec<usize>,
}

/// Nodes and classes that share pCPUs with no others.
#[derive(Debug, Default)]
pub(super) struct Component {
    pub(super) nodes: Vec<usize>,
    pub(super) classes: Vec<usize>,
    /// The branches above its leaves, parents first, without the root.
    pub(super) branches: Vec<usize>,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Structure {
    key: Key,
    built: bool,
    pub(super) faults: Vec<Fault>,
    pub(super) branches: Vec<Branch>,
    pub(super) leaves: Vec<Leaf>,
    pub(super) buckets: Vec<Bucket>,
    pub(super) nodes: Vec<Node>,
    pub(super) strands: Vec<Strand>,
    /// Strand and class of each arc.
    pub(super) arcs: Vec<(usize, usize)>,
    pub(super) classes: Vec<PcpuClass>,
    pub(super) components: Vec<Component>,
    /// The leaf of each claimant that takes part.
    pub(super) leaf_of: Vec<Option<usize>>,
    /// The branch of each group that takes part.
    pub(super) branch_of: Vec<Option<usize>>,
}

/// A set of pCPUs by their places in the input.
type Mask = Vec<u64>;

/// The strands of a claimant: pCPUs and number of threads.
type Strands = Vec<(Mask, u32)>;

/// A claimant before it is a leaf.
struct Placed {
    branch: usize,
    claimant: usize,
    strands: Strands,
}

/// A node before it is one.
struct Draft {
    strands: Strands,
    /// Branch, claimant and threads of each member.
    members: Vec<(usize, usize, u32)>,
}

impl Structure {
    /// Builds anew if the input has changed in what counts here; says whether it has.
    pub(super) fn follow(&mut self, host: &Host) -> bool {
        if self.built && self.key.fits(host) {
            return false;
        }
        *self = Self {
            key: Key::of(host),
            built: true,
            ..Self::default()
        };
        let limits = self.build_tree(host);
        let strands = self.find_strands(host, &limits);
        self.build_nodes(host, strands);
        self.build_components();
        true
    }

    /// Orders the groups; returns the pCPUs that each branch leaves to those below it.
    fn build_tree(&mut self, host: &Host) -> Vec<Mask> {
        let words = host.pcpus.len().div_ceil(64);
        let mut all = vec![0; words];
        let mut seen = HashSet::new();
        for (index, pcpu) in host.pcpus.iter().enumerate() {
            if seen.insert(pcpu.id) {
                all[index / 64] |= 1 << (index % 64);
            } else {
                self.fault(Place::Pcpu(pcpu.id), FaultKind::Twice);
            }
        }
        let mut children: Vec<Vec<usize>> = vec![Vec::new(); host.groups.len()];
        self.branches.push(Branch {
            group: None,
            parent: 0,
            depth: 0,
            branches: Vec::new(),
            leaves: Vec::new(),
        });
        self.branch_of = vec![None; host.groups.len()];
        let mut limits = vec![all];
        let mut next: Vec<(usize, usize)> = Vec::new();
        for (index, group) in host.groups.iter().enumerate() {
            match group.parent {
                None => next.push((index, 0)),
                Some(parent) if parent < host.groups.len() => children[parent].push(index),
                Some(parent) => self.fault(Place::Group(index), FaultKind::Parent(parent)),
            }
        }
        let mut done = 0;
        while let Some((index, parent)) = next.get(done).copied() {
            done += 1;
            let branch = self.branches.len();
            self.branches.push(Branch {
                group: Some(index),
                parent,
                depth: self.branches[parent].depth + 1,
                branches: Vec::new(),
                leaves: Vec::new(),
            });
            self.branches[parent].branches.push(branch);
            self.branch_of[index] = Some(branch);
            let limit = match &host.groups[index].cpus {
                Some(cpus) => restrict(&limits[parent], cpus, host),
                None => limits[parent].clone(),
            };
            limits.push(limit);
            next.extend(children[index].iter().map(|child| (*child, branch)));
        }
        for index in 0..host.groups.len() {
            if self.branch_of[index].is_none() && self.goes_round(host, index) {
                self.fault(Place::Group(index), FaultKind::Cycle);
            }
        }
        limits
    }

    /// Is the group part of a circle? Those that only hang on one, or on a missing parent, are left out without a word.
    fn goes_round(&self, host: &Host, group: usize) -> bool {
        let mut at = group;
        for _ in 0..host.groups.len() {
            match host.groups[at].parent {
                Some(parent) if parent == group => return true,
                Some(parent) if parent < host.groups.len() => at = parent,
                _ => return false,
            }
        }
        false
    }

    /// The strands of each claimant that takes part.
    fn find_strands(&mut self, host: &Host, limits: &[Mask]) -> Vec<Placed> {
        let mut found = Vec::new();
        for (index, claimant) in host.claimants.iter().enumerate() {
            let place = Place::Claimant(index);
            let branch = match claimant.parent {
                None => 0,
                Some(parent) => match self.branch_of.get(parent) {
                    None => {
                        self.fault(place, FaultKind::Parent(parent));
                        continue;
                    }
                    Some(None) => {
                        self.fault(place, FaultKind::Cut(parent));
                        continue;
                    }
                    Some(Some(branch)) => *branch,
                },
            };
            if claimant.threads.count() == 0 {
                self.fault(place, FaultKind::NoThreads);
                continue;
            }
            let limit = &limits[branch];
            let mut strands: Strands = Vec::new();
            let mut homeless = false;
            let mut add = |mask: Mask, count: u32| {
                if mask.iter().all(|word| *word == 0) {
                    homeless = true;
                } else if let Some(strand) = strands.iter_mut().find(|strand| strand.0 == mask) {
                    strand.1 += count;
                } else {
                    strands.push((mask, count));
                }
            };
            match &claimant.threads {
                Threads::Alike { count, cpus: None } => add(limit.clone(), *count),
                Threads::Alike {
                    count,
                    cpus: Some(cpus),
                } => add(restrict(limit, cpus, host), *count),
                Threads::Pinned(sets) => {
                    for cpus in sets {
                        add(restrict(limit, cpus, host), 1);
                    }
                }
            }
            if homeless {
                self.fault(place, FaultKind::NoPcpus);
            }
            if !strands.is_empty() {
                strands.sort_unstable();
                found.push(Placed {
                    branch,
                    claimant: index,
                    strands,
                });
            }
        }
        found
    }

    fn build_nodes(&mut self, host: &Host, claimants: Vec<Placed>) {
        let classes = self.build_classes(host, &claimants);
        // Claimants of one strand are told apart by its pCPUs only; each other one stands alone.
        let mut shared: HashMap<Mask, usize> = HashMap::new();
        let mut drafts: Vec<Draft> = Vec::new();
        for Placed {
            branch,
            claimant,
            strands,
        } in claimants
        {
            let threads = strands.iter().map(|(_, count)| count).sum();
            let draft = match strands.as_slice() {
                [(mask, _)] => *shared.entry(mask.clone()).or_insert(drafts.len()),
                _ => drafts.len(),
            };
            if draft == drafts.len() {
                drafts.push(Draft {
                    strands,
                    members: Vec::new(),
                });
            }
            drafts[draft].members.push((branch, claimant, threads));
        }
        self.leaf_of = vec![None; host.claimants.len()];
        for Draft {
            strands,
            mut members,
        } in drafts
        {
            members.sort_unstable();
            let alike = strands.len() == 1;
            let node = self.nodes.len();
            let first = (self.leaves.len(), self.buckets.len(), self.strands.len());
            for (branch, claimant, threads) in members {
                let leaf = self.leaves.len();
                self.leaf_of[claimant] = Some(leaf);
                self.branches[branch].leaves.push(leaf);
                self.leaves.push(Leaf {
                    claimant,
                    branch,
                    node,
                    threads: f64::from(threads),
                });
                match self.buckets[first.1..].last_mut() {
                    Some(bucket) if bucket.branch == branch => bucket.leaves.end += 1,
                    _ => self.buckets.push(Bucket {
                        branch,
                        leaves: leaf..leaf + 1,
                    }),
                }
            }
            let first_arc = self.arcs.len();
            for (mask, count) in strands {
                let strand = self.strands.len();
                let start = self.arcs.len();
                for (class, pcpus) in classes.iter().enumerate() {
                    if has(&mask, pcpus[0]) {
                        self.classes[class].arcs.push(self.arcs.len());
                        self.arcs.push((strand, class));
                    }
                }
                self.strands.push(Strand {
                    node,
                    threads: if alike {
                        f64::INFINITY
                    } else {
                        f64::from(count)
                    },
                    arcs: start..self.arcs.len(),
                });
            }
            let mut reached: Vec<usize> = self.arcs[first_arc..].iter().map(|arc| arc.1).collect();
            reached.sort_unstable();
            let overlaps = reached.windows(2).any(|pair| pair[0] == pair[1]);
            self.nodes.push(Node {
                component: 0,
                overlaps,
                leaves: first.0..self.leaves.len(),
                buckets: first.1..self.buckets.len(),
                strands: first.2..self.strands.len(),
            });
        }
    }

    /// Splits the pCPUs by each set that occurs; the classes come by their lowest pCPU.
    fn build_classes(&mut self, host: &Host, claimants: &[Placed]) -> Vec<Vec<usize>> {
        let mut masks: Vec<&Mask> = claimants
            .iter()
            .flat_map(|claimant| claimant.strands.iter().map(|(mask, _)| mask))
            .collect();
        masks.sort_unstable();
        masks.dedup();
        let mut class_of = vec![0; host.pcpus.len()];
        let mut count = 1;
        for mask in masks {
            let mut split: HashMap<usize, usize> = HashMap::new();
            for (index, class) in class_of.iter_mut().enumerate() {
                if has(mask, index) {
                    *class = *split.entry(*class).or_insert_with(|| {
                        count += 1;
                        count - 1
                    });
                }
            }
        }
        let mut by_class: HashMap<usize, Vec<usize>> = HashMap::new();
        let mut seen = HashSet::new();
        for (index, pcpu) in host.pcpus.iter().enumerate() {
            if seen.insert(pcpu.id) {
                by_class.entry(class_of[index]).or_default().push(index);
            }
        }
        let mut classes: Vec<Vec<usize>> = by_class.into_values().collect();
        for class in &mut classes {
            class.sort_unstable_by_key(|index| host.pcpus[*index].id);
        }
        classes.sort_unstable_by_key(|class| host.pcpus[class[0]].id);
        self.classes = classes
            .iter()
            .map(|pcpus| PcpuClass {
                pcpus: pcpus.clone(),
                arcs: Vec::new(),
            })
            .collect();
        classes
    }

    fn build_components(&mut self) {
        let mut leader: Vec<usize> = (0..self.classes.len()).collect();
        for node in &self.nodes {
            let arcs = self.arcs_of(node.strands.clone());
            let first = root(&leader, self.arcs[arcs.start].1);
            for (_, class) in &self.arcs[arcs] {
                let other = root(&leader, *class);
                leader[other] = first;
            }
        }
        let mut component_of: HashMap<usize, usize> = HashMap::new();
        for class in 0..self.classes.len() {
            let component = *component_of
                .entry(root(&leader, class))
                .or_insert(self.components.len());
            if component == self.components.len() {
                self.components.push(Component::default());
            }
            self.components[component].classes.push(class);
        }
        for (index, node) in self.nodes.iter_mut().enumerate() {
            let class = self.arcs[self.strands[node.strands.start].arcs.start].1;
            node.component = component_of[&root(&leader, class)];
            self.components[node.component].nodes.push(index);
        }
        for component in &mut self.components {
            let mut above: Vec<usize> = Vec::new();
            for node in &component.nodes {
                for bucket in &self.buckets[self.nodes[*node].buckets.clone()] {
                    let mut branch = bucket.branch;
                    while branch != 0 {
                        above.push(branch);
                        branch = self.branches[branch].parent;
                    }
                }
            }
            above.sort_unstable();
            above.dedup();
            component.branches = above;
        }
    }

    /// The arcs of neighbouring strands.
    pub(super) fn arcs_of(&self, strands: Range<usize>) -> Range<usize> {
        match strands.clone().last() {
            Some(last) => self.strands[strands.start].arcs.start..self.strands[last].arcs.end,
            None => 0..0,
        }
    }

    fn fault(&mut self, place: Place, kind: FaultKind) {
        self.faults.push(Fault { place, kind });
    }
}

fn root(leader: &[usize], mut class: usize) -> usize {
    while leader[class] != class {
        class = leader[class];
    }
    class
}

fn has(mask: &Mask, index: usize) -> bool {
    mask[index / 64] & (1 << (index % 64)) != 0
}

fn restrict(limit: &Mask, cpus: &CpuSet, host: &Host) -> Mask {
    let mut mask = limit.clone();
    for (index, pcpu) in host.pcpus.iter().enumerate() {
        if !cpus.contains(pcpu.id) {
            mask[index / 64] &= !(1 << (index % 64));
        }
    }
    mask
}
