//! The gRPC service: admission of nodes, and both directions of a stream.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot},
    time::timeout,
};
use tokio_stream::{Stream, StreamExt, wrappers::ReceiverStream};
use tonic::{Request, Response, Status, Streaming};
use xpu_timer_proto::{
    PROTOCOL_VERSION,
    v1::{
        ClusterMessage, Delivered, Delivery, NodeHello, NodeMessage, cluster_server, delivery, node_message::Message,
    },
};

use crate::{http::server::Caller, job::StreamId};

/// A message to a node. Boxed, because a channel allocates room for 32 messages at once and each
/// node has a channel.
pub type Outbound = Box<Result<ClusterMessage, Status>>;
/// The sending side of a stream.
pub type Outgoing = mpsc::Sender<Outbound>;

/// Events on the streams.
#[derive(Debug)]
pub enum StreamEvent {
    /// A node sent its hello.
    Joined(StreamId, Box<NodeHello>, Outgoing),
    /// The node sent a message.
    Message(StreamId, Box<Message>),
    /// The stream ended, with the reason.
    Ended(StreamId, String),
    /// A client starts a delivery. The reply says whether its key is expected.
    DeliveryStarted(Arc<str>, oneshot::Sender<bool>),
    /// A piece of the delivery.
    DeliveryPiece(Arc<str>, Box<delivery::Message>, Credit),
    /// The delivery ended, complete or not.
    DeliveryEnded(Arc<str>),
    /// A node of this name was refused, with the reason.
    Refused(String, String),
}

/// The share of the receive budget that a piece of a delivery takes until it is merged or written.
/// Dropping it returns the share, and the next piece is read. A slow disk thus slows the nodes down
/// instead of filling the memory.
#[derive(Debug, Default)]
pub struct Credit(#[allow(dead_code, reason = "it is held for its drop")] Option<OwnedSemaphorePermit>);

/// The service.
#[derive(Debug)]
pub struct Service {
    /// Receives all events. Bounded, so that a slow hub slows the nodes down.
    pub events: mpsc::Sender<StreamEvent>,
    /// The next stream number.
    pub next: AtomicU64,
}

/// A node must send its first message within this time.
const FIRST_WORD: Duration = Duration::from_secs(10);
/// Messages to one node that may queue. A node that does not read them is disconnected.
const OUTGOING: usize = 64;
/// Pieces of one delivery in memory at a time. Each may have half a megabyte; a tree is one piece.
const PIECES: usize = 4;

#[tonic::async_trait]
impl cluster_server::Cluster for Service {
    type JoinStream = Pin<Box<dyn Stream<Item = Result<ClusterMessage, Status>> + Send>>;

    async fn join(&self, request: Request<Streaming<NodeMessage>>) -> Result<Response<Self::JoinStream>, Status> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let caller = request.extensions().get::<Caller>().cloned();
        let mut messages = request.into_inner();
        let (outgoing, answers) = mpsc::channel(OUTGOING);
        let events = self.events.clone();
        tokio::spawn(async move {
            // Boxed, so that the task of a stream that has joined is small.
            if Box::pin(admit(id, caller, &mut messages, outgoing, &events)).await {
                let why = listen(id, &mut messages, &events).await;
                // Fails only when the process ends.
                let _ = events.send(StreamEvent::Ended(id, why)).await;
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(answers).map(|message: Outbound| *message))))
    }

    async fn bring(&self, request: Request<Streaming<Delivery>>) -> Result<Response<Delivered>, Status> {
        let mut pieces = request.into_inner();
        let first = timeout(FIRST_WORD, pieces.message()).await;
        let first = first.map_err(|_| Status::deadline_exceeded("the key did not arrive in time"))??;
        let Some(Delivery { message: Some(delivery::Message::Key(key)) }) = first else {
            return Err(Status::failed_precondition("the first message must be the key"));
        };
        let key: Arc<str> = key.into();
        let (reply, known) = oneshot::channel();
        // Fails only when the process ends.
        let _ = self.events.send(StreamEvent::DeliveryStarted(Arc::clone(&key), reply)).await;
        if !known.await.unwrap_or(false) {
            return Err(Status::not_found("no delivery with this key is expected, or its deadline has passed"));
        }
        let _guard = DeliveryGuard { events: self.events.clone(), key: Arc::clone(&key) };
        let pieces_here = Arc::new(Semaphore::new(PIECES));
        loop {
            // The semaphore is never closed.
            let credit = Credit(Arc::clone(&pieces_here).acquire_owned().await.ok());
            let Some(Delivery { message }) = pieces.message().await? else { break };
            let Some(message) = message else { continue };
            let _ = self.events.send(StreamEvent::DeliveryPiece(Arc::clone(&key), Box::new(message), credit)).await;
        }
        Ok(Response::new(Delivered {}))
    }
}

/// Reports the end of a delivery, even if its call is dropped in the middle.
struct DeliveryGuard {
    events: mpsc::Sender<StreamEvent>,
    key: Arc<str>,
}

impl Drop for DeliveryGuard {
    fn drop(&mut self) {
        // Without a runtime the process is ending.
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let (events, key) = (self.events.clone(), Arc::clone(&self.key));
        runtime.spawn(async move { events.send(StreamEvent::DeliveryEnded(key)).await });
    }
}

/// Receives the hello of a stream. Returns whether the node joins.
async fn admit(
    id: StreamId,
    caller: Option<Caller>,
    messages: &mut Streaming<NodeMessage>,
    outgoing: Outgoing,
    events: &mpsc::Sender<StreamEvent>,
) -> bool {
    let refusal = match timeout(FIRST_WORD, messages.next()).await.ok().flatten() {
        Some(Ok(NodeMessage { message: Some(Message::Hello(hello)) })) => match check(&hello) {
            Ok(()) => {
                // On loopback there may be no token.
                if let Some(caller) = &caller {
                    caller.is_trusted();
                }
                // Fails only when the process ends.
                let _ = events.send(StreamEvent::Joined(id, Box::new(hello), outgoing)).await;
                return true;
            }
            Err(status) => {
                let refused = StreamEvent::Refused(hello.node, status.message().into());
                let _ = events.send(refused).await;
                status
            }
        },
        Some(Ok(_)) => Status::failed_precondition("the first message must be Hello"),
        _ => return false,
    };
    // Fails if the node is gone.
    let _ = outgoing.send(Box::new(Err(refusal))).await;
    false
}

fn check(hello: &NodeHello) -> Result<(), Status> {
    if hello.protocol != PROTOCOL_VERSION {
        return Err(Status::failed_precondition(format!(
            "the node speaks protocol {} and this cluster collector {PROTOCOL_VERSION}; use collectors of one release",
            hello.protocol
        )));
    }
    // A short identity could be guessed and used to take over the stream of another node.
    if hello.identity.len() < 16 {
        return Err(Status::invalid_argument("Hello has no identity"));
    }
    Ok(())
}

/// Reads messages until the stream ends, and returns why it ended.
async fn listen(id: StreamId, messages: &mut Streaming<NodeMessage>, events: &mpsc::Sender<StreamEvent>) -> String {
    loop {
        match messages.next().await {
            None => return "it ended the stream".into(),
            Some(Err(status)) => return status.message().to_string(),
            Some(Ok(NodeMessage { message: None })) => {}
            Some(Ok(NodeMessage { message: Some(message) })) => {
                if events.send(StreamEvent::Message(id, Box::new(message))).await.is_err() {
                    return "this collector ends".into();
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tonic::{
        service::Routes,
        transport::{Channel, Endpoint},
    };
    use xpu_timer_proto::v1::{DumpFile, cluster_client::ClusterClient};

    use super::*;
    use crate::{
        cluster::web::{Pages, router},
        http::{access::Token, server::Server, watch::Limits},
    };

    /// The service as the collector serves it on loopback, without a token: its address, and the
    /// events of the service.
    async fn served_within(limits: Limits) -> (Endpoint, mpsc::Receiver<StreamEvent>) {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (events, received) = mpsc::channel(64);
        let service = cluster_server::ClusterServer::new(Service { events, next: AtomicU64::new(1) });
        let pages = Pages { commands: mpsc::unbounded_channel().0, token: Token::new(None), local_only: true };
        let server = Server { limits, slots: Arc::default(), tls: None, http2: true };
        // The server ends with the runtime of the test.
        tokio::spawn(server.run(listener, router(pages, Routes::new(service).into_axum_router())));
        (Channel::from_shared(url).unwrap(), received)
    }

    /// A client of the service, and the events of the service.
    async fn served() -> (ClusterClient<Channel>, mpsc::Receiver<StreamEvent>) {
        let (endpoint, received) = served_within(Limits::of_cluster(1024)).await;
        (ClusterClient::new(endpoint.connect().await.unwrap()), received)
    }

    #[tokio::test]
    async fn streams_of_nodes_do_not_use_up_the_connections_of_the_owner() {
        let limits = Limits::of_cluster(1024);
        let (endpoint, mut received) = served_within(limits).await;
        let nodes = limits.own + 20;
        let mut streams = Vec::new();
        for node in 0..nodes {
            let mut client = ClusterClient::new(endpoint.connect().await.unwrap());
            let identity = format!("identity-of-node-{node:05}");
            let hello = NodeHello { protocol: PROTOCOL_VERSION, identity, ..Default::default() };
            let hello = NodeMessage { message: Some(Message::Hello(hello)) };
            let messages = tokio_stream::once(hello).chain(tokio_stream::pending());
            let stream = client.join(messages).await.unwrap().into_inner();
            let joined = received.recv().await;
            let Some(StreamEvent::Joined(_, _, outgoing)) = joined else { panic!("node {node}: {joined:?}") };
            // The stream lasts as long as its sender.
            streams.push((stream, outgoing));
        }
        // One more connection of the owner finds room, and no stream has ended.
        let mut client = ClusterClient::new(endpoint.connect().await.unwrap());
        let key = Delivery { message: Some(delivery::Message::Key("k".into())) };
        let refused = tokio::spawn(async move { client.bring(tokio_stream::once(key)).await });
        let Some(StreamEvent::DeliveryStarted(_, known)) = received.recv().await else { panic!("a stream ended") };
        known.send(false).unwrap();
        assert_eq!(refused.await.unwrap().unwrap_err().code(), tonic::Code::NotFound);
    }

    #[tokio::test]
    async fn a_protocol_mismatch_is_reported_on_both_sides() {
        let (mut client, mut received) = served().await;
        let hello = NodeHello { protocol: PROTOCOL_VERSION + 1, node: "old".into(), ..Default::default() };
        let mut answers = client
            .join(tokio_stream::once(NodeMessage { message: Some(Message::Hello(hello)) }))
            .await
            .unwrap()
            .into_inner();
        let status = answers.next().await.unwrap().unwrap_err();
        let versions = [
            format!("speaks protocol {}", PROTOCOL_VERSION + 1),
            format!("this cluster collector {PROTOCOL_VERSION};"),
        ];
        let Some(StreamEvent::Refused(node, why)) = received.recv().await else { panic!("the hub is not informed") };
        assert_eq!((node.as_str(), why.as_str()), ("old", status.message()));
        assert!(versions.iter().all(|version| why.contains(version)), "{why}");
    }

    #[tokio::test]
    async fn pieces_in_memory_are_bounded_by_credits() {
        let (mut client, mut received) = served().await;
        let count = 3 * PIECES;
        let file = |_| delivery::Message::File(DumpFile { data: vec![7; 1000], ..Default::default() });
        let messages = std::iter::once(delivery::Message::Key("k".into())).chain((0..count).map(file));
        let pieces: Vec<Delivery> = messages.map(|message| Delivery { message: Some(message) }).collect();
        let sent = tokio::spawn(async move { client.bring(tokio_stream::iter(pieces)).await });
        let mut credits = Vec::new();
        while let Some(event) = received.recv().await {
            match event {
                StreamEvent::DeliveryStarted(_, known) => known.send(true).unwrap(),
                StreamEvent::DeliveryPiece(_, _, credit) => credits.push(credit),
                _ => {}
            }
            if credits.len() == PIECES {
                break;
            }
        }
        // Nothing is written, as on a stalled disk.
        let more = timeout(Duration::from_millis(300), received.recv()).await;
        assert!(more.is_err(), "{more:?}");
        let mut written = credits.len();
        credits.clear();
        while let Some(event) = received.recv().await {
            match event {
                StreamEvent::DeliveryPiece(..) => written += 1,
                StreamEvent::DeliveryEnded(_) => break,
                _ => {}
            }
        }
        assert_eq!(written, count);
        sent.await.unwrap().unwrap();
    }
}
