//! The directors of the cluster in etcd: the record of this director, and the records of all.

use lvs_api::daemon::DirectorSeen;

use super::Daemon;
use crate::health::Prober;
use crate::sources::etcd::Director;

impl<P: Prober> Daemon<P> {
    /// Writes the record of this director to etcd.
    pub(super) fn publish_director(&mut self) {
        let inputs = &self.inputs;
        if inputs.config.cluster.is_none() {
            return;
        }
        let expanded = &inputs.expanded;
        let director = Director {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            revision: expanded.revision.number,
            digest: expanded.revision.digest,
            services: expanded.services.len(),
            servers: expanded.servers(),
            ready: self.reporter.ready && inputs.dataplane.contact.1 && inputs.cluster.has_peers(),
            maintenance: inputs.cluster.is_in_maintenance(),
            left_out: !expanded.left_out.is_empty() || self.reloader.held_back.is_some(),
        };
        inputs.sources.announce(director);
    }

    /// The entries of all directors.
    pub(super) fn directors(&self) -> Vec<DirectorSeen> {
        let Some(cluster) = &self.inputs.config.cluster else {
            return Vec::new();
        };
        let all = self.inputs.sources.directors().into_iter();
        all.map(|(name, director)| DirectorSeen {
            own: name == cluster.director,
            name,
            version: director.version,
            revision: u64::try_from(director.revision).unwrap_or(0),
            digest: format!("{:08x}", director.digest),
            services: director.services,
            servers: director.servers,
            ready: director.ready,
            maintenance: director.maintenance,
            left_out: director.left_out,
        })
        .collect()
    }
}
