//! Which pCPU time serves whom: a maximum flow from nodes by their strands to classes of pCPUs, by augmenting paths, and the
//! minimum cut that says who holds up whom when not all can be served.
//!
//! That is all there is to placing vCPUs: any amounts for threads and pCPUs with no thread above one CPU and no pCPU above its
//! supply can be scheduled without a thread in two places at once (Gonzalez and Sahni, "Open shop scheduling to minimize finish
//! time", J. ACM 1976).

use super::structure::Structure;

/// Less than this is rounding.
pub(super) const TINY: f64 = 1e-10;

/// How the search came to a strand.
#[derive(Debug, Clone, Copy)]
enum Way {
    /// From its node, to serve more.
    Node,
    /// From a class, back along this arc, to serve it from another.
    Arc(usize),
}

/// A flow through the whole structure; components don't touch each other's parts.
#[derive(Debug, Default)]
pub(super) struct Flow {
    /// Along each arc.
    pub(super) arcs: Vec<f64>,
    /// Through each strand.
    pub(super) strands: Vec<f64>,
    /// Through each node.
    pub(super) nodes: Vec<f64>,
    /// Into each class.
    pub(super) classes: Vec<f64>,
    pub(super) supply: Vec<f64>,
    /// Classes that are given away, and strands that are served by them.
    pub(super) closed_classes: Vec<bool>,
    pub(super) closed_strands: Vec<bool>,
    stamp: u32,
    seen_nodes: Vec<u32>,
    seen_strands: Vec<u32>,
    seen_classes: Vec<u32>,
    strand_way: Vec<Way>,
    /// The arc by which the search came to a class.
    class_way: Vec<usize>,
    /// The strand by which the search came to a node.
    node_way: Vec<usize>,
    queue: Vec<usize>,
}

impl Flow {
    /// No flow, all open. The supplies stay.
    pub(super) fn clear(&mut self, structure: &Structure) {
        fn set<T: Clone>(list: &mut Vec<T>, len: usize, value: T) {
            list.clear();
            list.resize(len, value);
        }
        let (nodes, strands) = (structure.nodes.len(), structure.strands.len());
        let classes = structure.classes.len();
        set(&mut self.arcs, structure.arcs.len(), 0.0);
        set(&mut self.strands, strands, 0.0);
        set(&mut self.nodes, nodes, 0.0);
        set(&mut self.classes, classes, 0.0);
        set(&mut self.closed_classes, classes, false);
        set(&mut self.closed_strands, strands, false);
        set(&mut self.seen_nodes, nodes, 0);
        set(&mut self.seen_strands, strands, 0);
        set(&mut self.seen_classes, classes, 0);
        set(&mut self.strand_way, strands, Way::Node);
        set(&mut self.class_way, classes, 0);
        set(&mut self.node_way, nodes, 0);
        self.stamp = 0;
    }

    /// Serves `node` with `want`, or as much of it as can be without taking from another node; says what is missing.
    pub(super) fn serve(&mut self, structure: &Structure, node: usize, want: f64) -> f64 {
        if self.nodes[node] > want {
            self.lower(structure, node, want);
        }
        self.serve_directly(structure, node, want);
        while want - self.nodes[node] > TINY {
            self.stamp += 1;
            let Some(class) = self.search(structure, &[node], true) else {
                break;
            };
            self.augment(structure, node, class, want - self.nodes[node]);
        }
        want - self.nodes[node]
    }

    /// Takes from all that serves a node in proportion.
    pub(super) fn lower(&mut self, structure: &Structure, node: usize, want: f64) {
        let part = if self.nodes[node] > 0.0 {
            (want / self.nodes[node]).max(0.0)
        } else {
            0.0
        };
        self.nodes[node] = 0.0;
        for strand in structure.nodes[node].strands.clone() {
            self.strands[strand] = 0.0;
            for arc in structure.strands[strand].arcs.clone() {
                let old = self.arcs[arc];
                self.arcs[arc] = old * part;
                self.strands[strand] += self.arcs[arc];
                let class = structure.arcs[arc].1;
                self.classes[class] = (self.classes[class] - (old - self.arcs[arc])).max(0.0);
            }
            self.nodes[node] += self.strands[strand];
        }
    }

    fn serve_directly(&mut self, structure: &Structure, node: usize, want: f64) {
        for strand in structure.nodes[node].strands.clone() {
            if self.closed_strands[strand] {
                continue;
            }
            let threads = structure.strands[strand].threads;
            for arc in structure.strands[strand].arcs.clone() {
                let class = structure.arcs[arc].1;
                if self.closed_classes[class] {
                    continue;
                }
                let more = (self.supply[class] - self.classes[class])
                    .min(threads - self.strands[strand])
                    .min(want - self.nodes[node]);
                if more > 0.0 {
                    self.arcs[arc] += more;
                    self.strands[strand] += more;
                    self.nodes[node] += more;
                    self.classes[class] += more;
                }
            }
        }
    }

    /// Marks what more for some nodes could be taken from, directly or by serving others otherwise; with `stop`, returns the
    /// first class with time left.
    fn search(&mut self, structure: &Structure, from: &[usize], stop: bool) -> Option<usize> {
        let (nodes, strands) = (structure.nodes.len(), structure.strands.len());
        self.queue.clear();
        for node in from {
            self.seen_nodes[*node] = self.stamp;
            self.queue.push(*node);
        }
        let mut next = 0;
        while let Some(at) = self.queue.get(next).copied() {
            next += 1;
            if at < nodes {
                for strand in structure.nodes[at].strands.clone() {
                    let open = !self.closed_strands[strand]
                        && self.strands[strand] + TINY < structure.strands[strand].threads;
                    if open && self.seen_strands[strand] != self.stamp {
                        self.seen_strands[strand] = self.stamp;
                        self.strand_way[strand] = Way::Node;
                        self.queue.push(nodes + strand);
                    }
                }
            } else if at < nodes + strands {
                let strand = at - nodes;
                let node = structure.strands[strand].node;
                if self.seen_nodes[node] != self.stamp {
                    self.seen_nodes[node] = self.stamp;
                    self.node_way[node] = strand;
                    self.queue.push(node);
                }
                for arc in structure.strands[strand].arcs.clone() {
                    let class = structure.arcs[arc].1;
                    if self.closed_classes[class] || self.seen_classes[class] == self.stamp {
                        continue;
                    }
                    self.seen_classes[class] = self.stamp;
                    self.class_way[class] = arc;
                    if stop && self.classes[class] + TINY < self.supply[class] {
                        return Some(class);
                    }
                    self.queue.push(nodes + strands + class);
                }
            } else {
                let class = at - nodes - strands;
                for arc in &structure.classes[class].arcs {
                    let strand = structure.arcs[*arc].0;
                    if self.arcs[*arc] > TINY && self.seen_strands[strand] != self.stamp {
                        self.seen_strands[strand] = self.stamp;
                        self.strand_way[strand] = Way::Arc(*arc);
                        self.queue.push(nodes + strand);
                    }
                }
            }
        }
        None
    }

    /// Sends up to `most` along the way that the search found from `start` to `last`.
    fn augment(&mut self, structure: &Structure, start: usize, last: usize, most: f64) {
        let mut amount = most.min(self.supply[last] - self.classes[last]);
        self.walk(structure, start, last, |flow, step| {
            let room = match step {
                Step::Into(strand) => structure.strands[strand].threads - flow.strands[strand],
                Step::Back(arc) => flow.arcs[arc],
                Step::Along(_) | Step::OutOf(_) => f64::INFINITY,
            };
            amount = amount.min(room);
        });
        self.walk(structure, start, last, |flow, step| match step {
            Step::Along(arc) => flow.arcs[arc] += amount,
            Step::Back(arc) => flow.arcs[arc] -= amount,
            Step::Into(strand) => flow.strands[strand] += amount,
            Step::OutOf(strand) => flow.strands[strand] -= amount,
        });
        self.classes[last] += amount;
        self.nodes[start] += amount;
    }

    /// Takes the way backwards, from the last class to the first node.
    fn walk(
        &mut self,
        structure: &Structure,
        start: usize,
        last: usize,
        mut visit: impl FnMut(&mut Self, Step),
    ) {
        let mut class = last;
        loop {
            let arc = self.class_way[class];
            let mut strand = structure.arcs[arc].0;
            visit(self, Step::Along(arc));
            let back = match self.strand_way[strand] {
                Way::Arc(back) => back,
                Way::Node => {
                    visit(self, Step::Into(strand));
                    let node = structure.strands[strand].node;
                    if node == start {
                        return;
                    }
                    strand = self.node_way[node];
                    visit(self, Step::OutOf(strand));
                    match self.strand_way[strand] {
                        Way::Arc(back) => back,
                        // A node other than the first is found by one of its strands, and that by a class.
                        Way::Node => return,
                    }
                }
            };
            visit(self, Step::Back(back));
            class = structure.arcs[back].1;
        }
    }

    /// Copies what belongs to some nodes and classes into `saved`.
    pub(super) fn save(
        &self,
        structure: &Structure,
        nodes: &[usize],
        classes: &[usize],
        saved: &mut Vec<f64>,
    ) {
        saved.clear();
        for node in nodes {
            let strands = structure.nodes[*node].strands.clone();
            saved.push(self.nodes[*node]);
            saved.extend_from_slice(&self.strands[strands.clone()]);
            saved.extend_from_slice(&self.arcs[structure.arcs_of(strands)]);
        }
        saved.extend(classes.iter().map(|class| self.classes[*class]));
    }

    /// Puts back what [`Self::save`] copied.
    pub(super) fn restore(
        &mut self,
        structure: &Structure,
        nodes: &[usize],
        classes: &[usize],
        saved: &[f64],
    ) {
        let mut saved = saved.iter().copied();
        let mut put = |place: &mut f64| *place = saved.next().unwrap_or(0.0);
        for node in nodes {
            let strands = structure.nodes[*node].strands.clone();
            put(&mut self.nodes[*node]);
            self.strands[strands.clone()].iter_mut().for_each(&mut put);
            self.arcs[structure.arcs_of(strands)]
                .iter_mut()
                .for_each(&mut put);
        }
        for class in classes {
            put(&mut self.classes[*class]);
        }
    }

    /// Marks what more for some nodes would have to be taken from; ask with [`Flow::marked_node`] and the like.
    pub(super) fn mark(&mut self, structure: &Structure, from: &[usize]) {
        self.stamp += 1;
        self.search(structure, from, false);
    }

    pub(super) fn marked_node(&self, node: usize) -> bool {
        self.seen_nodes[node] == self.stamp
    }

    pub(super) fn marked_strand(&self, strand: usize) -> bool {
        self.seen_strands[strand] == self.stamp
    }

    pub(super) fn marked_class(&self, class: usize) -> bool {
        self.seen_classes[class] == self.stamp
    }
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Along(usize),
    Back(usize),
    Into(usize),
    OutOf(usize),
}
