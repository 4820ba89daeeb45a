//! How the messages between node and cluster become bytes: tonic's protobuf with buffers that begin small. A cluster collector has two
//! of them for each of its nodes, which mostly say nothing.

use std::marker::PhantomData;

use prost::Message;
use tonic::codec::{self, BufferSettings};
use tonic_prost::ProstCodec;

/// Room that a stream takes from the start, and by which it grows.
const BUFFER_BYTES: usize = 1024;
/// Messages that wait are sent together up to this.
const YIELD_BYTES: usize = 32 * 1024;

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
