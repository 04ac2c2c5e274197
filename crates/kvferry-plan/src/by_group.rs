//! What a request reads from one source, group by group of the destination: for who reads them in
//! different ways.

use kvferry_layout::{Loops, LoopsError};

use crate::compile::Cluster;
use crate::cursor::Cursor;
use crate::summary::Summary;
use crate::transfer::{Copies, Transfer};

impl Transfer<'_> {
    /// How many groups the destination has.
    pub fn groups(&self) -> usize {
        self.plan.groups.len()
    }

    /// Like [`summary`](Self::summary), of one group.
    pub fn summary_of(&self, source: usize, group: usize) -> Summary {
        Cursor::new(self.clusters_of(source, group), &self.segments).summary()
    }

    /// Like [`copies`](Self::copies), of one group.
    pub fn copies_of(&self, source: usize, group: usize) -> Copies<'_> {
        Copies { cursor: Cursor::new(self.clusters_of(source, group), &self.segments) }
    }

    /// Like [`loops`](Self::loops), of some groups.
    pub fn loops_of(
        &self,
        source: usize,
        groups: impl Fn(usize) -> bool,
    ) -> Result<Loops, LoopsError> {
        let clusters = self.plan.sources.get(source).map_or(&[][..], |clusters| clusters);
        self.loops_over(clusters.iter().filter(|cluster| groups(self.group(cluster))))
    }

    fn group(&self, cluster: &Cluster) -> usize {
        self.plan.pairings[cluster.pairing].destination.group
    }

    /// The clusters of a group: they are sorted by it.
    fn clusters_of(&self, source: usize, group: usize) -> &[Cluster] {
        let clusters = self.plan.sources.get(source).map_or(&[][..], |clusters| clusters);
        let start = clusters.partition_point(|cluster| self.group(cluster) < group);
        let end = clusters.partition_point(|cluster| self.group(cluster) <= group);
        &clusters[start..end]
    }
}
