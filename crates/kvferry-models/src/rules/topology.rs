//! How an engine is told to run a model.

use std::fmt;
use std::str::FromStr;

use crate::error::TopologyError;
use crate::suggest;

/// The order of a cache's axes in memory, outermost first: layer, block, head, token (`N`), content.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "the names are the order")]
pub enum Layout {
    Lbhnc,
    Lbnhc,
    Lhbnc,
    Blhnc,
    Blnhc,
    Bhlnc,
}

impl Layout {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::Lbhnc, Self::Lbnhc, Self::Lhbnc, Self::Blhnc, Self::Blnhc, Self::Bhlnc];

    /// Its name.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Lbhnc => "LBHNC",
            Self::Lbnhc => "LBNHC",
            Self::Lhbnc => "LHBNC",
            Self::Blhnc => "BLHNC",
            Self::Blnhc => "BLNHC",
            Self::Bhlnc => "BHLNC",
        }
    }

    /// Which of (layer, block, head, token, content) comes first, second, ...
    pub(crate) fn order(&self) -> [usize; 5] {
        let place = |letter| "LBHNC".find(letter).expect("names are made of these letters");
        let mut order = [0; 5];
        for (slot, letter) in order.iter_mut().zip(self.name().chars()) {
            *slot = place(letter);
        }
        order
    }

    /// Whether a block of all layers lies together.
    pub fn is_block_outermost(&self) -> bool {
        self.order()[0] == 1
    }

    /// Whether a layer's block is one run of bytes.
    pub fn is_block_compact(&self) -> bool {
        matches!(self.order(), [0, 1, ..] | [1, 0, ..])
    }

    /// Whether heads, tokens and content of a block follow each other in this order.
    pub fn is_block_contiguous(&self) -> bool {
        matches!(self.order(), [.., 2, 3, 4])
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The order of a convolution state's axes in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Conv {
    /// Columns outside, channels inside.
    Sd,
    /// Channels outside, columns inside.
    Ds,
}

impl fmt::Display for Conv {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sd => "sd",
            Self::Ds => "ds",
        })
    }
}

/// What keys, values and latents are quantised to, by the engine's own names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "the names are the engine's")]
pub enum CacheType {
    Fp8,
    Fp8E5m2,
    Fp8PerTokenHead,
    Int8PerTokenHead,
    Int4PerTokenHead,
    Nvfp4,
    Fp8DsMla,
    Nvfp4DsMla,
}

impl CacheType {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::Fp8,
        Self::Fp8E5m2,
        Self::Fp8PerTokenHead,
        Self::Int8PerTokenHead,
        Self::Int4PerTokenHead,
        Self::Nvfp4,
        Self::Fp8DsMla,
        Self::Nvfp4DsMla,
    ];

    /// Its name.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Fp8 => "fp8",
            Self::Fp8E5m2 => "fp8_e5m2",
            Self::Fp8PerTokenHead => "fp8_per_token_head",
            Self::Int8PerTokenHead => "int8_per_token_head",
            Self::Int4PerTokenHead => "int4_per_token_head",
            Self::Nvfp4 => "nvfp4",
            Self::Fp8DsMla => "fp8_ds_mla",
            Self::Nvfp4DsMla => "nvfp4_ds_mla",
        }
    }

    /// Whether its scales are numbers of the layer, outside of the pages.
    pub fn is_scaled(self) -> bool {
        matches!(self, Self::Fp8 | Self::Fp8E5m2)
    }
}

/// A scale of the layer: a positive 32-bit number, as engines keep it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Scale(u32);

impl Scale {
    /// The scale that engines assume where a checkpoint has none.
    pub const ONE: Self = Self(0x3f80_0000);

    fn read(text: &str) -> Option<Self> {
        let number: f32 = text.parse().ok()?;
        (number.is_finite() && number > 0.0).then_some(Self(number.to_bits()))
    }
}

impl fmt::Display for Scale {
    /// Nine digits, which tell any two apart.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = format!("{:.8e}", f64::from(f32::from_bits(self.0)));
        let (digits, power) = text.split_once('e').unwrap_or((&text, "0"));
        let power: i32 = power.parse().unwrap_or(0);
        if (-4..9).contains(&power) {
            let decimals = usize::try_from(8 - power).unwrap_or(0);
            let plain = format!("{:.decimals$}", f64::from(f32::from_bits(self.0)));
            let short = plain.trim_end_matches('0').trim_end_matches('.');
            return f.write_str(if plain.contains('.') { short } else { &plain });
        }
        let digits = digits.trim_end_matches('0').trim_end_matches('.');
        let sign = if power < 0 { '-' } else { '+' };
        write!(f, "{digits}e{sign}{:02}", power.abs())
    }
}

/// How an engine runs a model, as on a command line: `tp=4,pp=2,block=32`. What is left out is up to
/// the engine's rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    /// Tensor-parallel ranks.
    pub tp: u32,
    /// Pipeline stages.
    pub pp: u32,
    /// Ranks that share the work of a prefill (prefill context parallelism).
    pub pcp: u32,
    /// Ranks that take turns at a block's tokens (decode context parallelism).
    pub dcp: u32,
    /// Tokens in a rank's turn.
    pub interleave: u32,
    /// Tokens in a block.
    pub block: Option<u32>,
    /// The one block size that the attention kernels take.
    pub kernel: Option<u32>,
    /// The order of a cache's axes.
    pub layout: Option<Layout>,
    /// The order of a convolution state's axes.
    pub conv: Option<Conv>,
    /// Speculative tokens.
    pub spec: u32,
    /// What the engine quantises keys, values and latents to (`kv`); they have the model's format
    /// otherwise.
    pub kv: Option<CacheType>,
    /// The scales of keys and values, where they are numbers of the layer (`kscale`, `vscale`).
    pub scales: [Scale; 2],
    /// Blocks in the pool.
    pub blocks: Option<u32>,
    /// Whether layers with different windows get block tables of their own (the hybrid allocator).
    /// Without it, sliding layers are kept in full.
    pub hma: bool,
    /// Whether later requests may use blocks again (prefix caching). Then a layer needs all that its
    /// block table keeps, and not only what it looks at.
    pub caching: bool,
}

impl Default for Topology {
    fn default() -> Self {
        Self {
            tp: 1,
            pp: 1,
            pcp: 1,
            dcp: 1,
            interleave: 1,
            block: None,
            kernel: None,
            layout: None,
            conv: None,
            spec: 0,
            kv: None,
            scales: [Scale::ONE; 2],
            blocks: None,
            hma: true,
            caching: true,
        }
    }
}

const KEYS: [&str; 16] = [
    "tp",
    "pp",
    "pcp",
    "dcp",
    "interleave",
    "block",
    "kernel",
    "layout",
    "conv",
    "spec",
    "kv",
    "kscale",
    "vscale",
    "blocks",
    "hma",
    "caching",
];

/// The keys by their names in vLLM, where those are others.
const IN_VLLM: [(&str, &str); 6] = [
    ("tensor_parallel_size", "tp"),
    ("pipeline_parallel_size", "pp"),
    ("prefill_context_parallel_size", "pcp"),
    ("decode_context_parallel_size", "dcp"),
    ("block_size", "block"),
    ("kv_cache_dtype", "kv"),
];

/// What is said with the others, and does not matter here.
const NO_MATTER: [(&str, &str); 2] = [
    (
        "dp",
        "each of the engines that work in data parallel keeps a cache of its own, and is one side of a pair",
    ),
    ("ep", "experts keep nothing of a prompt"),
];

/// A key as it is written here.
fn key_of(written: &str) -> String {
    let key = written.trim().trim_start_matches("--").to_lowercase().replace('-', "_");
    IN_VLLM.into_iter().find(|&(long, _)| long == key).map_or(key, |(_, short)| short.to_owned())
}

impl Topology {
    /// Number of ranks.
    pub fn ranks(&self) -> u32 {
        self.tp * self.pp * self.pcp
    }
}

impl FromStr for Topology {
    type Err = TopologyError;

    fn from_str(text: &str) -> Result<Self, TopologyError> {
        let mut topology = Self::default();
        let mut seen: Vec<String> = vec![];
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let Some((key, value)) = part.split_once('=') else {
                return Err(TopologyError::NotAPair(part.to_owned()));
            };
            let (key, value) = (key_of(key), value.trim());
            if seen.contains(&key) {
                return Err(TopologyError::Twice(key));
            }
            seen.push(key.clone());
            let key = key.as_str();
            let number = |range: std::ops::RangeInclusive<u32>| {
                value.parse().ok().filter(|number| range.contains(number)).ok_or_else(|| {
                    TopologyError::BadValue {
                        key: key.to_owned(),
                        value: value.to_owned(),
                        expected: format!("a number from {} to {}", range.start(), range.end()),
                        nearest: None,
                    }
                })
            };
            let word = |words: &[&'static str]| {
                words.iter().position(|word| word.eq_ignore_ascii_case(value)).ok_or_else(|| {
                    TopologyError::BadValue {
                        key: key.to_owned(),
                        value: value.to_owned(),
                        expected: format!("one of {}", words.join(", ")),
                        nearest: suggest::nearest(value, words.iter().copied()).map(str::to_owned),
                    }
                })
            };
            match key {
                "tp" => topology.tp = number(1..=1024)?,
                "pp" => topology.pp = number(1..=1024)?,
                "pcp" => topology.pcp = number(1..=1024)?,
                "dcp" => topology.dcp = number(1..=1024)?,
                "interleave" => topology.interleave = number(1..=1 << 20)?,
                "block" => topology.block = Some(number(1..=1 << 20)?),
                "kernel" => topology.kernel = Some(number(1..=1 << 20)?),
                "layout" => {
                    // HND and NHD are the engine's old names.
                    let mut words: Vec<&str> = Layout::ALL.iter().map(Layout::name).collect();
                    words.extend(["HND", "NHD"]);
                    let index = word(&words)?;
                    topology.layout = Some(match index {
                        6 => Layout::Lbhnc,
                        7 => Layout::Lbnhc,
                        index => Layout::ALL[index],
                    });
                }
                "conv" => {
                    topology.conv = Some([Conv::Sd, Conv::Ds][word(&["sd", "ds"])?]);
                }
                "spec" => topology.spec = number(0..=64)?,
                "kv" => {
                    let mut words: Vec<&str> = CacheType::ALL.iter().map(CacheType::name).collect();
                    words.extend(["auto", "fp8_e4m3"]);
                    topology.kv = match word(&words)? {
                        index if index < CacheType::ALL.len() => Some(CacheType::ALL[index]),
                        index if words[index] == "auto" => None,
                        _ => Some(CacheType::Fp8),
                    };
                }
                "kscale" | "vscale" => {
                    let scale = Scale::read(value).ok_or_else(|| TopologyError::BadValue {
                        key: key.to_owned(),
                        value: value.to_owned(),
                        expected: "a positive number".to_owned(),
                        nearest: None,
                    })?;
                    topology.scales[usize::from(key == "vscale")] = scale;
                }
                "blocks" => topology.blocks = Some(number(2..=u32::MAX)?),
                "hma" => topology.hma = word(&["off", "on"])? == 1,
                "caching" => topology.caching = word(&["off", "on"])? == 1,
                _ => {
                    if let Some((_, why)) = NO_MATTER.iter().find(|(known, _)| *known == key) {
                        return Err(TopologyError::NoMatter {
                            key: key.to_owned(),
                            why: (*why).to_owned(),
                        });
                    }
                    return Err(TopologyError::UnknownKey {
                        found: key.to_owned(),
                        nearest: suggest::nearest(key, KEYS).map(str::to_owned),
                        known: KEYS.join(", "),
                    });
                }
            }
        }
        if topology.scales != [Scale::ONE; 2] && !topology.kv.is_some_and(CacheType::is_scaled) {
            let (kv, [keys, values]) =
                (topology.kv.map_or("auto", |kv| kv.name()), topology.scales);
            return Err(TopologyError::Contradiction(format!(
                "kscale={keys} and vscale={values} mean nothing to kv={kv}, whose scales are not \
                 numbers of the layer"
            )));
        }
        if let (Some(block), Some(kernel)) = (topology.block, topology.kernel)
            && block % kernel != 0
        {
            return Err(TopologyError::Contradiction(format!(
                "block={block} cannot be made of kernel blocks: kernel={kernel} does not divide it"
            )));
        }
        let ranks = [topology.tp, topology.pp, topology.pcp].map(u64::from).iter().product::<u64>();
        if ranks > 4096 {
            return Err(TopologyError::Contradiction(format!(
                "tp={}, pp={} and pcp={} make {ranks} ranks; at most 4096 are allowed",
                topology.tp, topology.pp, topology.pcp
            )));
        }
        Ok(topology)
    }
}

impl fmt::Display for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tp={}", self.tp)?;
        let parallel = [("pp", self.pp), ("pcp", self.pcp), ("dcp", self.dcp)];
        for (key, value) in parallel.into_iter().chain([("interleave", self.interleave)]) {
            if value != 1 {
                write!(f, ",{key}={value}")?;
            }
        }
        for (key, value) in [("block", self.block), ("kernel", self.kernel)] {
            if let Some(value) = value {
                write!(f, ",{key}={value}")?;
            }
        }
        if let Some(layout) = self.layout {
            write!(f, ",layout={layout}")?;
        }
        if let Some(conv) = self.conv {
            write!(f, ",conv={conv}")?;
        }
        if self.spec != 0 {
            write!(f, ",spec={}", self.spec)?;
        }
        if let Some(kv) = self.kv {
            write!(f, ",kv={}", kv.name())?;
        }
        for (key, scale) in ["kscale", "vscale"].into_iter().zip(self.scales) {
            if scale != Scale::ONE {
                write!(f, ",{key}={scale}")?;
            }
        }
        if let Some(blocks) = self.blocks {
            write!(f, ",blocks={blocks}")?;
        }
        for (key, on) in [("hma", self.hma), ("caching", self.caching)] {
            if !on {
                write!(f, ",{key}=off")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_printed_is_read_back() {
        for text in [
            "tp=1",
            "tp=4,pp=2",
            "tp=2,pp=3,pcp=2,dcp=4,interleave=16",
            "tp=2,block=64,kernel=16,layout=BLNHC,conv=ds,spec=3,blocks=9,hma=off,caching=off",
            "tp=2,kv=int8_per_token_head",
            "tp=2,kv=fp8,kscale=0.100000001,vscale=3.00000011e-07",
        ] {
            assert_eq!(text.parse::<Topology>().unwrap().to_string(), text);
        }
        assert_eq!("layout=nhd".parse::<Topology>().unwrap().layout, Some(Layout::Lbnhc));
    }

    #[test]
    fn mistakes_are_named() {
        let error = |text: &str| text.parse::<Topology>().unwrap_err().to_string();
        assert!(error("tp").contains("key=value"));
        assert!(error("tpp=4").contains("did you mean 'pp'?") || error("tpp=4").contains("'tp'"));
        assert!(error("tp=0").contains("a number from 1"));
        assert!(error("tp=2,tp=2").contains("twice"));
        assert!(error("layout=LBHCN").contains("did you mean"));
        assert!(error("hma=no").contains("one of off, on"));
        assert!(error("kv=nvfp").contains("did you mean"));
        assert!(error("kv=fp8,kscale=-1").contains("a positive number"));
        assert!(
            error("kv=nvfp4,kscale=2").contains("kscale=2 and vscale=1 mean nothing to kv=nvfp4")
        );
        assert_eq!("kv=auto".parse::<Topology>().unwrap().kv, None);
        assert_eq!("kv=fp8_e4m3".parse::<Topology>().unwrap().kv, Some(CacheType::Fp8));
        assert!(error("block=24,kernel=16").contains("does not divide"));
        assert!(error("tp=1024,pp=1024").contains("4096"));
    }
}
