//! A set of at most 128 CPUs in one word: the simulator asks for "an idle one of these" at every event.

use hint_proto::CpuSet;

/// CPUs 0 to 127.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Mask(pub u128);

impl Mask {
    /// The most CPUs that it holds.
    pub const MOST: usize = 128;

    /// CPUs 0 to `count` - 1.
    #[must_use]
    pub fn first(count: usize) -> Self {
        if count >= Self::MOST {
            Self(u128::MAX)
        } else {
            Self((1 << count) - 1)
        }
    }

    /// Is `cpu` in it?
    #[must_use]
    pub fn has(self, cpu: usize) -> bool {
        self.0 >> cpu & 1 == 1
    }

    /// Puts `cpu` in.
    pub fn insert(&mut self, cpu: usize) {
        self.0 |= 1 << cpu;
    }

    /// Takes `cpu` out.
    pub fn remove(&mut self, cpu: usize) {
        self.0 &= !(1 << cpu);
    }

    /// What is in both.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// What is in it and not in `other`.
    #[must_use]
    pub fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// The first CPU in it from `start` on, going round.
    #[must_use]
    pub fn next_from(self, start: usize) -> Option<usize> {
        let above = self.0 >> start << start;
        let found = if above == 0 { self.0 } else { above };
        (found != 0).then(|| found.trailing_zeros() as usize)
    }

    /// How many.
    #[must_use]
    pub fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    /// None at all?
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The CPUs in ascending order.
    pub fn iter(self) -> impl Iterator<Item = usize> {
        let mut left = self.0;
        std::iter::from_fn(move || {
            (left != 0).then(|| {
                let cpu = left.trailing_zeros() as usize;
                left &= left - 1;
                cpu
            })
        })
    }

    /// The CPUs of `set` below 128.
    #[must_use]
    pub fn from_set(set: &CpuSet) -> Self {
        let mut mask = Self::default();
        for cpu in set.iter().filter(|cpu| (*cpu as usize) < Self::MOST) {
            mask.insert(cpu as usize);
        }
        mask
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_holds_cpus() {
        assert_eq!(Mask::first(3).iter().collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(Mask::first(128).len(), 128);
        let mut mask = Mask::first(3).without(Mask::first(1));
        mask.insert(127);
        mask.remove(2);
        assert_eq!(mask.iter().collect::<Vec<_>>(), [1, 127]);
        assert_eq!((mask.next_from(0), mask.next_from(2)), (Some(1), Some(127)));
        assert_eq!(Mask::first(1).next_from(100), Some(0));
        assert_eq!(Mask::default().next_from(5), None);
        let set = CpuSet::parse_list("1-2,200").expect("a list");
        assert_eq!(Mask::from_set(&set).iter().collect::<Vec<_>>(), [1, 2]);
    }
}
