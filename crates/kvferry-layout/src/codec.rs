//! Manifests on the wire (compact) and on disk (readable).

use serde::{Deserialize, Serialize};

use crate::draft::Draft;
use crate::error::ManifestError;
use crate::manifest::Manifest;

/// The largest binary manifest that is decoded. A 100-layer hybrid takes some tens of kilobytes.
pub const MAX_BINARY_BYTES: usize = 4 << 20;
/// The largest JSON manifest that is decoded.
pub const MAX_JSON_BYTES: usize = 64 << 20;

const MAGIC: &[u8; 4] = b"KVFM";
/// The compact form does not name its fields: every change of them changes its version.
const BINARY_VERSION: u16 = 3;
/// The version before has no writers, which are its last field: one byte says that there are none.
const WITHOUT_WRITERS: u16 = 2;
/// The readable form does: a new field that may be left out does not.
const JSON_VERSION: u16 = 1;

#[derive(Serialize)]
struct Written<'a> {
    kvferry_manifest: u16,
    manifest: &'a Draft,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Read {
    #[serde(rename = "kvferry_manifest")]
    _version: u16,
    manifest: Draft,
}

#[derive(Deserialize)]
struct ReadVersion {
    kvferry_manifest: Option<u16>,
}

impl Manifest {
    /// The compact form: four bytes of magic, a version, and the facts with variable-length numbers.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        let version =
            if self.draft().writers.is_empty() { WITHOUT_WRITERS } else { BINARY_VERSION };
        bytes.extend_from_slice(&version.to_le_bytes());
        postcard::to_extend(self.draft(), bytes).expect("plain data in memory always serialises")
    }

    /// Decodes and checks the compact form. Safe on any bytes: memory stays in proportion to their
    /// number, which is limited to [`MAX_BINARY_BYTES`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, ManifestError> {
        if bytes.len() > MAX_BINARY_BYTES {
            return Err(ManifestError::TooLarge { bytes: bytes.len(), limit: MAX_BINARY_BYTES });
        }
        let known = BINARY_VERSION;
        let version = |found: String| ManifestError::Version { found, known };
        let Some((head, body)) = bytes.split_first_chunk::<6>() else {
            return Err(version(format!("{} bytes are not a manifest", bytes.len())));
        };
        if head[..4] != MAGIC[..] {
            return Err(version("these bytes are not a manifest".to_owned()));
        }
        let found = u16::from_le_bytes([head[4], head[5]]);
        let longer;
        let body = match found {
            BINARY_VERSION => body,
            WITHOUT_WRITERS => {
                longer = [body, &[0]].concat();
                &longer
            }
            _ => return Err(version(format!("this is manifest version {found}"))),
        };
        let decode = |problem: String| ManifestError::Decode { problem };
        let (draft, rest): (Draft, _) =
            postcard::take_from_bytes(body).map_err(|error| decode(error.to_string()))?;
        if !rest.is_empty() {
            return Err(decode(format!("{} bytes follow its end", rest.len())));
        }
        Self::new(draft)
    }

    /// The readable form.
    pub fn to_json(&self) -> String {
        let written = Written { kvferry_manifest: JSON_VERSION, manifest: self.draft() };
        serde_json::to_string_pretty(&written).expect("plain data in memory always serialises")
    }

    /// Decodes and checks the readable form.
    pub fn from_json(json: &str) -> Result<Self, ManifestError> {
        if json.len() > MAX_JSON_BYTES {
            return Err(ManifestError::TooLarge { bytes: json.len(), limit: MAX_JSON_BYTES });
        }
        let decode =
            |error: serde_json::Error| ManifestError::Decode { problem: error.to_string() };
        let known = JSON_VERSION;
        let version = |found: String| ManifestError::Version { found, known };
        let read: ReadVersion = serde_json::from_str(json).map_err(decode)?;
        match read.kvferry_manifest {
            Some(JSON_VERSION) => {}
            Some(found) => return Err(version(format!("this is manifest version {found}"))),
            None => return Err(version("this JSON has no 'kvferry_manifest' version".to_owned())),
        }
        let read: Read = serde_json::from_str(json).map_err(decode)?;
        Self::new(read.manifest)
    }
}
