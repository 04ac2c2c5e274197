//! Certificates for TLS, each of an authority of its own.

use std::path::Path;

use kvferry_agent::TlsFiles;
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};

pub fn certificates(directory: &Path, name: &str) -> TlsFiles {
    let authority_key = KeyPair::generate().unwrap();
    let mut authority = CertificateParams::new(vec![]).unwrap();
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority_pem = authority.self_signed(&authority_key).unwrap().pem();
    let issuer = Issuer::new(authority, authority_key);
    let key = KeyPair::generate().unwrap();
    let leaf = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
    let leaf = leaf.signed_by(&key, &issuer).unwrap();
    let write = |what: &str, text: String| {
        let path = directory.join(format!("{name}-{what}.pem"));
        std::fs::write(&path, text).unwrap();
        path
    };
    TlsFiles {
        certificate: write("certificate", leaf.pem()),
        private_key: write("key", key.serialize_pem()),
        authority: write("authority", authority_pem),
    }
}
