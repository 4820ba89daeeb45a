//! The strongly connected components of a graph that no edge leaves.

/// Tarjan's algorithm without recursion, from the given roots. Returns only components that no edge
/// leaves, ordered by their smallest node, which is the order of ranks.
pub(super) fn sinks(edges: &[Vec<usize>], roots: std::ops::Range<usize>) -> Vec<Vec<usize>> {
    const NEW: usize = usize::MAX;
    let mut order = vec![NEW; edges.len()];
    let mut low = vec![0; edges.len()];
    let mut component_of = vec![NEW; edges.len()];
    let mut components: Vec<Vec<usize>> = Vec::new();
    let mut counter = 0;
    let mut stack: Vec<usize> = Vec::new();
    let mut work: Vec<(usize, usize)> = Vec::new();
    for root in roots {
        if order[root] != NEW {
            continue;
        }
        work.push((root, 0));
        while let Some((node, next)) = work.pop() {
            if next == 0 {
                order[node] = counter;
                low[node] = counter;
                counter += 1;
                stack.push(node);
            }
            if let Some(&to) = edges[node].get(next) {
                work.push((node, next + 1));
                if order[to] == NEW {
                    work.push((to, 0));
                } else if component_of[to] == NEW {
                    low[node] = low[node].min(order[to]);
                }
                continue;
            }
            if low[node] == order[node] {
                let mut component = Vec::new();
                while let Some(member) = stack.pop() {
                    component_of[member] = components.len();
                    component.push(member);
                    if member == node {
                        break;
                    }
                }
                component.sort_unstable();
                components.push(component);
            }
            if let Some(&(parent, _)) = work.last() {
                low[parent] = low[parent].min(low[node]);
            }
        }
    }
    let mut sinks: Vec<Vec<usize>> = components
        .iter()
        .enumerate()
        .filter(|(index, component)| {
            component.iter().all(|node| edges[*node].iter().all(|to| component_of[*to] == *index))
        })
        .map(|(_, component)| component.clone())
        .collect();
    sinks.sort_unstable();
    sinks
}
