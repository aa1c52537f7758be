//! The one type for sets of CPUs, with the kernel's two text forms: lists (`0-2,4-23`) and hex masks (`f,fffc0000`).

use std::fmt;
use std::str::FromStr;

/// CPU numbers are below this: the largest `CONFIG_NR_CPUS` of any architecture.
pub const MAX_CPUS: u32 = 8192;

const WORD: u32 = 64;

/// Characters of a wrong text that an error shows.
const SHOWN: usize = 80;

/// A set of CPU numbers, each below [`MAX_CPUS`]; sparse sets are fine.
///
/// Its `Display` is the kernel's list form, and `FromStr` reads it.
#[derive(Clone, Default)]
pub struct CpuSet {
    words: Vec<u64>,
}

/// Why a text is not a CPU list or mask.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ParseCpuSetError {
    /// Something other than a number stands where a number must.
    #[error("expected a CPU number in {text:?}, found {found:?}")]
    Number {
        /// The whole text, shortened.
        text: String,
        /// The part that is no number.
        found: String,
    },
    /// A range ends before it starts.
    #[error("expected a rising range in {text:?}, found {first}-{last}")]
    Order {
        /// The whole text, shortened.
        text: String,
        /// First CPU of the range.
        first: u32,
        /// Last CPU of the range.
        last: u32,
    },
    /// A CPU number is out of range.
    #[error("expected CPU numbers below {MAX_CPUS} in {text:?}, found {found}")]
    TooLarge {
        /// The whole text, shortened.
        text: String,
        /// The number.
        found: u64,
    },
    /// A stride (`0-31:2/4`) has an impossible size.
    #[error("expected a stride like 0-31:2/4 with 1 <= 2 <= 4 in {text:?}, found {found:?}")]
    Stride {
        /// The whole text, shortened.
        text: String,
        /// The stride.
        found: String,
    },
    /// A group of a mask is not 1 to 8 hex digits.
    #[error("expected groups of 1 to 8 hex digits in the mask {text:?}, found {found:?}")]
    Mask {
        /// The whole text, shortened.
        text: String,
        /// The group.
        found: String,
    },
}

impl CpuSet {
    /// The empty set.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a CPU; numbers of [`MAX_CPUS`] and above are left out, and `false` says so.
    pub fn insert(&mut self, cpu: u32) -> bool {
        if cpu >= MAX_CPUS {
            return false;
        }
        let word = (cpu / WORD) as usize;
        if self.words.len() <= word {
            self.words.resize(word + 1, 0);
        }
        self.words[word] |= 1 << (cpu % WORD);
        true
    }

    /// Adds the CPUs from `first` to `last`, both below [`MAX_CPUS`]; a word at a time, since a text may repeat a range often.
    fn insert_range(&mut self, first: u32, last: u32) {
        let (low, high) = ((first / WORD) as usize, (last / WORD) as usize);
        if self.words.len() <= high {
            self.words.resize(high + 1, 0);
        }
        for word in low..=high {
            let from = if word == low { first % WORD } else { 0 };
            let to = if word == high { last % WORD } else { WORD - 1 };
            self.words[word] |= (u64::MAX << from) & (u64::MAX >> (WORD - 1 - to));
        }
    }

    /// Takes a CPU out.
    pub fn remove(&mut self, cpu: u32) {
        if let Some(word) = self.words.get_mut((cpu / WORD) as usize) {
            *word &= !(1 << (cpu % WORD));
        }
    }

    /// Is the CPU in the set?
    #[must_use]
    pub fn contains(&self, cpu: u32) -> bool {
        self.words
            .get((cpu / WORD) as usize)
            .is_some_and(|word| word & (1 << (cpu % WORD)) != 0)
    }

    /// Number of CPUs in the set.
    #[must_use]
    pub fn len(&self) -> usize {
        self.words
            .iter()
            .map(|word| word.count_ones() as usize)
            .sum()
    }

    /// Is it empty?
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|word| *word == 0)
    }

    /// The lowest CPU.
    #[must_use]
    pub fn first(&self) -> Option<u32> {
        self.iter().next()
    }

    /// The CPUs, rising.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        (0u32..).zip(&self.words).flat_map(|(index, word)| {
            (0..WORD)
                .filter(move |bit| word & (1 << bit) != 0)
                .map(move |bit| index * WORD + bit)
        })
    }

    /// CPUs that are in both.
    #[must_use]
    pub fn intersection(&self, other: &Self) -> Self {
        let words = self
            .words
            .iter()
            .zip(&other.words)
            .map(|(a, b)| a & b)
            .collect();
        Self { words }
    }

    /// CPUs that are in either.
    #[must_use]
    pub fn union(&self, other: &Self) -> Self {
        self.iter().chain(other.iter()).collect()
    }

    /// CPUs that are in this set and not in the other.
    #[must_use]
    pub fn difference(&self, other: &Self) -> Self {
        self.iter().filter(|cpu| !other.contains(*cpu)).collect()
    }

    /// Are all CPUs of this set in the other?
    #[must_use]
    pub fn is_subset(&self, other: &Self) -> bool {
        self.iter().all(|cpu| other.contains(cpu))
    }

    /// Reads the kernel's list form as it stands in sysfs and on the command line: `0-2,4`, `0-31:2/4`, blank for none.
    ///
    /// Some kernels print an unset mask as `(null)`; that is the empty set.
    ///
    /// # Errors
    /// When the text is no such list or names a CPU of [`MAX_CPUS`] or above.
    pub fn parse_list(text: &str) -> Result<Self, ParseCpuSetError> {
        let whole = text.trim_matches(|c: char| c.is_ascii_whitespace() || c == '\0');
        let mut set = Self::new();
        if whole.is_empty() || whole == "(null)" {
            return Ok(set);
        }
        for part in whole.split(',') {
            let part = part.trim();
            let (range, stride) = match part.split_once(':') {
                Some((range, stride)) => (range, Some(stride)),
                None => (part, None),
            };
            let (first, last) = match range.split_once('-') {
                Some((first, last)) => (number(whole, first)?, number(whole, last)?),
                None => {
                    let cpu = number(whole, range)?;
                    (cpu, cpu)
                }
            };
            if first > last {
                return Err(ParseCpuSetError::Order {
                    text: shortened(whole),
                    first,
                    last,
                });
            }
            let Some(stride) = stride else {
                set.insert_range(first, last);
                continue;
            };
            let (used, group) = parse_stride(whole, stride)?;
            for start in (first..=last).step_by(group as usize) {
                set.insert_range(start, last.min(start + used - 1));
            }
        }
        Ok(set)
    }

    /// Reads the kernel's mask form: groups of up to 8 hex digits, the highest first (`f,fffc0000`).
    ///
    /// # Errors
    /// When a group is empty, too long or not hex, or a bit is [`MAX_CPUS`] or above.
    pub fn parse_mask(text: &str) -> Result<Self, ParseCpuSetError> {
        let whole = text.trim();
        let whole = whole.strip_prefix("0x").unwrap_or(whole);
        let mut set = Self::new();
        let mut base: u32 = 0;
        for group in whole.rsplit(',') {
            let fits =
                (1..=8).contains(&group.len()) && group.bytes().all(|b| b.is_ascii_hexdigit());
            let bits = u32::from_str_radix(group, 16)
                .ok()
                .filter(|_| fits)
                .ok_or_else(|| ParseCpuSetError::Mask {
                    text: shortened(whole),
                    found: shortened(group),
                })?;
            for bit in (0..32).filter(|bit| bits & (1 << bit) != 0) {
                if !set.insert(base.saturating_add(bit)) {
                    let found = u64::from(base) + u64::from(bit);
                    return Err(ParseCpuSetError::TooLarge {
                        text: shortened(whole),
                        found,
                    });
                }
            }
            base = base.saturating_add(32);
        }
        Ok(set)
    }

    /// The kernel's mask form: groups of 8 hex digits, none empty, the highest without leading zeros; `0` for none.
    #[must_use]
    pub fn to_mask(&self) -> String {
        let groups: Vec<u32> = self
            .words
            .iter()
            .flat_map(|word| [(*word & 0xffff_ffff) as u32, (*word >> 32) as u32])
            .collect();
        let used = groups
            .iter()
            .rposition(|group| *group != 0)
            .map_or(1, |last| last + 1);
        let mut text = String::new();
        for (index, group) in groups.iter().take(used).enumerate().rev() {
            if index + 1 == used {
                text.push_str(&format!("{group:x}"));
            } else {
                text.push_str(&format!(",{group:08x}"));
            }
        }
        if text.is_empty() {
            "0".to_owned()
        } else {
            text
        }
    }
}

/// What fits a log line.
fn shortened(text: &str) -> String {
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}

fn number(text: &str, part: &str) -> Result<u32, ParseCpuSetError> {
    let part = part.trim();
    let digits = !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    let value: u64 =
        part.parse()
            .ok()
            .filter(|_| digits)
            .ok_or_else(|| ParseCpuSetError::Number {
                text: shortened(text),
                found: shortened(part),
            })?;
    u32::try_from(value)
        .ok()
        .filter(|cpu| *cpu < MAX_CPUS)
        .ok_or_else(|| ParseCpuSetError::TooLarge {
            text: shortened(text),
            found: value,
        })
}

fn parse_stride(text: &str, stride: &str) -> Result<(u32, u32), ParseCpuSetError> {
    let wrong = || ParseCpuSetError::Stride {
        text: shortened(text),
        found: shortened(stride),
    };
    let (used, group) = stride.split_once('/').ok_or_else(wrong)?;
    let (used, group) = (number(text, used)?, number(text, group)?);
    if used == 0 || used > group {
        Err(wrong())
    } else {
        Ok((used, group))
    }
}

impl fmt::Display for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut cpus = self.iter().peekable();
        let mut separator = "";
        while let Some(first) = cpus.next() {
            let mut last = first;
            while let Some(next) = cpus.next_if(|next| *next == last + 1) {
                last = next;
            }
            if first == last {
                write!(f, "{separator}{first}")?;
            } else {
                write!(f, "{separator}{first}-{last}")?;
            }
            separator = ",";
        }
        Ok(())
    }
}

impl fmt::Debug for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CpuSet({self})")
    }
}

impl PartialEq for CpuSet {
    fn eq(&self, other: &Self) -> bool {
        self.iter().eq(other.iter())
    }
}

impl Eq for CpuSet {}

impl FromStr for CpuSet {
    type Err = ParseCpuSetError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::parse_list(text)
    }
}

impl FromIterator<u32> for CpuSet {
    /// Numbers of [`MAX_CPUS`] and above are left out.
    fn from_iter<I: IntoIterator<Item = u32>>(cpus: I) -> Self {
        let mut set = Self::new();
        for cpu in cpus {
            set.insert(cpu);
        }
        set
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn set(cpus: &[u32]) -> CpuSet {
        cpus.iter().copied().collect()
    }

    #[test]
    fn a_list_with_a_hole_is_read_whole_and_written_back() {
        let online = CpuSet::parse_list("0-2,4-23\n").unwrap();
        assert_eq!(online.len(), 23);
        assert!(!online.contains(3));
        assert!(online.contains(23));
        assert_eq!(online.to_string(), "0-2,4-23");
    }

    #[test]
    fn blanks_and_null_are_the_empty_set() {
        for text in ["", "\n", "   \n", "          (null)\n", "\0"] {
            assert_eq!(CpuSet::parse_list(text).unwrap(), CpuSet::new(), "{text:?}");
        }
    }

    #[test]
    fn strides_are_read_like_the_kernel_does() {
        assert_eq!(
            CpuSet::parse_list("0-15:2/4").unwrap(),
            set(&[0, 1, 4, 5, 8, 9, 12, 13])
        );
        assert_eq!(CpuSet::parse_list("1-5:1/2,7").unwrap(), set(&[1, 3, 5, 7]));
    }

    #[test]
    fn bad_lists_say_what_was_found() {
        for (text, says) in [
            ("0-2,x", "found \"x\""),
            ("0-2,", "found \"\""),
            ("3-1", "found 3-1"),
            ("8192", "found 8192"),
            ("99999999999", "found 99999999999"),
            ("-1", "found \"\""),
            ("+1", "found \"+1\""),
            ("0-7:3/2", "found \"3/2\""),
            ("0-7:0/2", "found \"0/2\""),
            ("0-7:2", "found \"2\""),
        ] {
            let error = CpuSet::parse_list(text).unwrap_err().to_string();
            assert!(error.contains(says), "{text:?}: {error}");
        }
    }

    #[test]
    fn masks_have_groups_of_eight_digits_and_none_empty() {
        let cpus: CpuSet = (18..36).collect();
        assert_eq!(cpus.to_mask(), "f,fffc0000");
        assert_eq!(
            CpuSet::parse_mask("00000000,00000000,0000000f,fffc0000").unwrap(),
            cpus
        );
        assert_eq!(CpuSet::parse_mask("f,fffc0000").unwrap(), cpus);
        assert_eq!(set(&[0, 64]).to_mask(), "1,00000000,00000001");
        assert_eq!(CpuSet::new().to_mask(), "0");
        for bad in ["ffffc0000", "00080000,,,,0", "", "g", "-1", "+1"] {
            assert!(CpuSet::parse_mask(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_mask_beyond_the_last_cpu_is_refused() {
        let too_long = format!("1{}", ",00000000".repeat(256));
        assert!(matches!(
            CpuSet::parse_mask(&too_long),
            Err(ParseCpuSetError::TooLarge { found: 8192, .. })
        ));
        let zeros = format!("0{}", ",00000000".repeat(300));
        assert_eq!(CpuSet::parse_mask(&zeros).unwrap(), CpuSet::new());
    }

    #[test]
    fn sets_of_different_length_compare_by_their_members() {
        let mut long = set(&[1, 8191]);
        long.remove(8191);
        assert_eq!(long, set(&[1]));
        assert!(long.is_subset(&set(&[0, 1])));
        assert_eq!(set(&[0, 1, 2]).difference(&set(&[1])), set(&[0, 2]));
        assert_eq!(
            set(&[0, 1, 200]).intersection(&set(&[1, 200, 300])),
            set(&[1, 200])
        );
        assert_eq!(set(&[0]).union(&set(&[200])), set(&[0, 200]));
        assert!(!long.insert(8192));
        assert_eq!(CpuSet::new().first(), None);
    }

    #[test]
    fn a_long_text_makes_no_long_error_and_no_long_work() {
        let repeats = ["0-8191"; 100_000].join(",");
        assert_eq!(CpuSet::parse_list(&repeats).unwrap().len(), 8192);
        let error = CpuSet::parse_list(&format!("{repeats},ü")).unwrap_err();
        assert!(error.to_string().len() < 200, "{error}");
        let error = CpuSet::parse_mask(&"ü".repeat(1000)).unwrap_err();
        assert!(error.to_string().len() < 500, "{error}");
        for text in ["0-4294967295", "4294967295", "0-7:1/4294967295"] {
            assert!(
                matches!(
                    CpuSet::parse_list(text),
                    Err(ParseCpuSetError::TooLarge { .. })
                ),
                "{text}"
            );
        }
    }

    proptest! {
        #[test]
        fn strides_are_what_the_kernel_makes_of_them(first in 0u32..300, length in 0u32..300, group in 1u32..100, used in 1u32..100) {
            prop_assume!(used <= group);
            let last = first + length;
            let wanted: CpuSet = (first..=last).filter(|cpu| (cpu - first) % group < used).collect();
            prop_assert_eq!(CpuSet::parse_list(&format!("{first}-{last}:{used}/{group}")).unwrap(), wanted);
        }

        #[test]
        fn both_forms_come_back(cpus in proptest::collection::btree_set(0..MAX_CPUS, 0..300)) {
            let set: CpuSet = cpus.iter().copied().collect();
            prop_assert_eq!(set.len(), cpus.len());
            prop_assert!(set.iter().eq(cpus.iter().copied()));
            prop_assert_eq!(&CpuSet::parse_list(&set.to_string()).unwrap(), &set);
            prop_assert_eq!(&CpuSet::parse_mask(&set.to_mask()).unwrap(), &set);
        }

        #[test]
        fn no_text_panics(text in ".{0,60}", listish in "[0-9,:/ -]{0,40}") {
            let _ = CpuSet::parse_list(&text);
            let _ = CpuSet::parse_mask(&text);
            let _ = CpuSet::parse_list(&listish);
            let _ = CpuSet::parse_mask(&listish);
        }
    }
}
