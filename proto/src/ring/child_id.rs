//! Identities of communicators that are made of another communicator.

/// Odd, so that multiplication by it can be inverted.
const CHILD_FACTOR: u64 = 0x9E37_79B9_7F4A_7C15;

/// The identity of a communicator that is created from another one. `key` distinguishes it from
/// other children and is equal on all ranks. If a parent has two identities, so has its child;
/// [`key_of_child`] shows that both are the same child.
#[must_use]
pub fn child_id(parent: u64, key: u64) -> u64 {
    parent.wrapping_mul(CHILD_FACTOR).wrapping_add(key)
}

/// The key from which [`child_id`] made a child of this parent.
#[must_use]
pub fn key_of_child(parent: u64, child: u64) -> u64 {
    child.wrapping_sub(parent.wrapping_mul(CHILD_FACTOR))
}

#[cfg(test)]
mod tests {
    use super::{child_id, key_of_child};

    #[test]
    fn the_key_of_a_child_is_had_again_from_the_two_identities() {
        let keys = [0, 1, 0xfeed_beef_0000_0001, u64::MAX];
        let parents = [1, 7, 0x1234_5678_9abc_def0, u64::MAX];
        for (parent, key) in parents.into_iter().flat_map(|parent| keys.map(|key| (parent, key))) {
            assert_eq!(key_of_child(parent, child_id(parent, key)), key);
        }
        // The identity of a grandchild depends on the order of the keys.
        assert_ne!(child_id(child_id(7, 3), 5), child_id(child_id(7, 5), 3));
    }
}
