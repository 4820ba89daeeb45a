//! A stream to the cluster collector, as the event loop of the node uses it.

use tokio::{runtime::Handle, sync::mpsc};
use tokio_stream::{StreamExt, wrappers::ReceiverStream};
use tonic::{
    Request, Status,
    metadata::{Ascii, MetadataValue},
    service::{Interceptor, interceptor::InterceptedService},
    transport::Channel,
};
use tracing::warn;
use xpu_timer_proto::v1::{
    Delivery, NodeMessage, cluster_client::ClusterClient, cluster_message, delivery, node_message::Message,
};

/// Number of pieces of a delivery that may wait; each may have half a megabyte.
const PIECES: usize = 2;

/// An event of the stream.
#[derive(Debug)]
pub enum Event {
    /// A stream is being opened; its first message must be the hello.
    Opened(Box<Link>),
    /// A message of the cluster.
    Message(Box<cluster_message::Message>),
    /// The stream ended, or could not be opened; the text gives the reason.
    Lost(String),
}

/// The sender of one stream and of its deliveries.
#[derive(Debug, Clone)]
pub struct Link {
    pub(super) messages: mpsc::Sender<NodeMessage>,
    pub(super) client: Client,
    pub(super) runtime: Handle,
}

/// The channel for the pieces of one delivery. It is bounded, so that a slow cluster slows the
/// delivery down.
pub type Delivering = mpsc::Sender<Delivery>;
pub(super) type Client = ClusterClient<InterceptedService<Channel, Proof>>;

impl Link {
    /// Sends a control message. Returns false when the stream has ended or is stuck, which ends it.
    #[must_use]
    pub fn send(&self, message: Message) -> bool {
        self.messages.try_send(NodeMessage { message: Some(message) }).is_ok()
    }

    /// Begins a delivery that the cluster requested with this key. It ends when the sender is
    /// dropped.
    #[must_use]
    pub fn bring(&self, key: String) -> Delivering {
        let (sender, pieces) = mpsc::channel(PIECES);
        let mut client = self.client.clone();
        let first = Delivery { message: Some(delivery::Message::Key(key)) };
        self.runtime.spawn(async move {
            let pieces = tokio_stream::once(first).chain(ReceiverStream::new(pieces));
            if let Err(status) = client.bring(pieces).await {
                warn!("the cluster collector does not take what it asked for: {}", words(&status));
            }
        });
        sender
    }
}

/// Authenticates each call.
#[derive(Debug, Clone)]
pub(super) struct Proof(pub(super) Option<MetadataValue<Ascii>>);

impl Interceptor for Proof {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(token) = &self.0 {
            request.metadata_mut().insert("authorization", token.clone());
        }
        Ok(request)
    }
}

/// The status of a call as one line.
pub(crate) fn words(status: &Status) -> String {
    format!("{}: {}", status.code().description(), status.message())
}
