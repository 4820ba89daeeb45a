//! The tonic codec of the messages between node and cluster: protobuf, with buffers that start
//! small. A cluster collector has two buffers for each node, and most nodes are idle.

use std::marker::PhantomData;

use prost::Message;
use tonic::codec::{self, BufferSettings};
use tonic_prost::ProstCodec;

use crate::v1::{Paces, RankPace};

/// Initial size of a stream's buffer, and the step by which it grows.
const BUFFER_BYTES: usize = 256;
/// Queued messages are sent together up to this size. The receiver's buffer has room for all that
/// is sent together, and twice for the largest message.
const YIELD_BYTES: usize = 512;
/// Maximum number of messages for the paces of a node.
const PACES: usize = 32;

/// Splits the paces of a node into messages of one rank, or of a few on a node with many ranks: a
/// cluster collector keeps a buffer for the largest message of each node.
#[must_use]
pub fn small_messages(ranks: Vec<RankPace>) -> Vec<Paces> {
    let size = ranks.len().div_ceil(PACES).max(1);
    let mut ranks = ranks.into_iter();
    let message = || Some(Paces { ranks: ranks.by_ref().take(size).collect() });
    std::iter::from_fn(message).take_while(|message| !message.ranks.is_empty()).collect()
}

/// Encodes `T` and decodes `U`.
#[derive(Debug, Clone)]
pub struct Codec<T, U>(PhantomData<(T, U)>);

impl<T, U> Default for Codec<T, U> {
    fn default() -> Self {
        Codec(PhantomData)
    }
}

impl<T, U> codec::Codec for Codec<T, U>
where
    T: Message + Send + 'static,
    U: Message + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = <ProstCodec<T, U> as codec::Codec>::Encoder;
    type Decoder = <ProstCodec<T, U> as codec::Codec>::Decoder;

    fn encoder(&mut self) -> Self::Encoder {
        ProstCodec::<T, U>::raw_encoder(BufferSettings::new(BUFFER_BYTES, YIELD_BYTES))
    }

    fn decoder(&mut self) -> Self::Decoder {
        ProstCodec::<T, U>::raw_decoder(BufferSettings::new(BUFFER_BYTES, YIELD_BYTES))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paces_are_split_into_few_messages() {
        for (ranks, messages) in [(0, 0), (1, 1), (8, 8), (32, 32), (33, 17), (1000, 32)] {
            let paces: Vec<RankPace> = (0..ranks).map(|rank| RankPace { rank, ..Default::default() }).collect();
            let split = small_messages(paces.clone());
            assert_eq!(split.len(), messages, "{ranks}");
            assert_eq!(split.into_iter().flat_map(|message| message.ranks).collect::<Vec<_>>(), paces);
        }
    }
}
