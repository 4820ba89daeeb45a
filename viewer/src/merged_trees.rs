//! Reads `stacks.bin`: the stacks of all ranks of a large job as two trees, merged by the cluster
//! collector. The folder contains the dumps of only some of these ranks.

use std::path::Path;
use xpu_timer_analysis::prefix_tree::PrefixTree;
use xpu_timer_proto::lenient;
use xpu_timer_proto::v1::StackTrees;

/// The stacks of all ranks.
#[derive(Debug)]
pub struct MergedTrees {
    /// Native stacks.
    pub native: PrefixTree,
    /// Python stacks.
    pub python: PrefixTree,
    /// Number of ranks in the job.
    pub world: u32,
}

impl MergedTrees {
    /// Number of ranks that have a stack.
    #[must_use]
    pub fn ranks(&self) -> u64 {
        let roots = self.native.nodes().iter().filter(|node| node.parent.is_none());
        let mut ranks = xpu_timer_analysis::rank_set::RankSet::new();
        for root in roots {
            ranks.union_with(&root.ranks);
        }
        ranks.len()
    }
}

/// The trees of a folder. `None` if there are none or they are invalid; the viewer then draws the
/// dumps of the folder.
#[must_use]
pub fn read(folder: &Path) -> Option<MergedTrees> {
    let message = lenient::decode::<StackTrees>(&crate::folder::read(&folder.join("stacks.bin")).ok()?).ok()?;
    let tree = |message: Option<xpu_timer_proto::v1::StackTree>| {
        let mut tree = PrefixTree::new();
        tree.merge_message(&message.unwrap_or_default()).ok().map(|()| tree)
    };
    Some(MergedTrees { native: tree(message.native)?, python: tree(message.python)?, world: message.world_size })
}

#[cfg(test)]
mod tests {
    use super::*;
    use xpu_timer_proto::Message;

    #[test]
    fn trees_of_all_ranks_are_read_and_rubbish_is_not() {
        let folder = tempfile::tempdir().unwrap();
        assert!(read(folder.path()).is_none());
        let mut tree = PrefixTree::new();
        for rank in [0, 1, 7] {
            tree.insert(["main@a:1", "wait@b:2"], rank);
        }
        let message = StackTrees { world_size: 9, native: Some(tree.to_message()), python: None };
        std::fs::write(folder.path().join("stacks.bin"), message.encode_to_vec()).unwrap();
        let trees = read(folder.path()).unwrap();
        assert_eq!((trees.world, trees.ranks(), trees.python.nodes().len()), (9, 3, 0));
        std::fs::write(folder.path().join("stacks.bin"), [0xff; 9]).unwrap();
        assert!(read(folder.path()).is_none());
    }
}
