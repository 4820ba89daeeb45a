//! The cluster role. Each node connects and keeps a stream. A hang on one node becomes an incident
//! of the job, and its verdict is made from the evidence of all nodes.

pub(crate) mod comparison;
pub mod config;
pub mod engine;
pub mod gather;
pub(crate) mod hub;
pub(crate) mod incident;
pub(crate) mod joins;
pub(crate) mod nodes;
pub(crate) mod ranks;
pub mod service;
pub mod status;
pub(crate) mod timeline;
pub(crate) mod web;

use std::{
    net::SocketAddr,
    sync::{Arc, atomic::AtomicU64},
    thread,
};

use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
    sync::mpsc,
    time::{MissedTickBehavior, interval},
};
use tonic::service::Routes;
use tracing::{error, info};
use xpu_timer_proto::v1::cluster_server::ClusterServer;

use crate::{
    cluster::{config::Settings, hub::Hub, service::Service, web::Pages},
    error::Error,
    http::{
        access::{Token, read_token},
        server::{Server, tls_acceptor},
        watch::Limits,
    },
    incident::part::MAX_MESSAGE_BYTES,
    os::{clock::Now, resources},
};

/// Threads that read the streams. One task owns the state, so more threads would only wait for it.
const THREADS: usize = 4;
/// Messages of nodes that may queue for the hub. When the queue is full, no stream is read.
const EVENTS: usize = 1024;
/// Runs the cluster collector until SIGTERM or SIGINT.
///
/// # Errors
/// If it cannot listen, or a file from its settings cannot be used.
pub fn run(settings: Settings) -> Result<(), Error> {
    let descriptors = resources::raise_descriptor_limit();
    // In one arena, the threads that receive and those that merge would often wait for its lock.
    resources::limit_arenas(2);
    resources::expect_large_heap();
    let threads = thread::available_parallelism().map_or(1, usize::from).min(THREADS);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(threads).enable_all().build();
    let runtime = runtime.map_err(Error::system("start the runtime"))?;
    let result = runtime.block_on(serve(settings, descriptors));
    runtime.shutdown_background();
    result
}

async fn serve(settings: Settings, descriptors: u64) -> Result<(), Error> {
    let token = settings.token_file.as_deref().map(read_token).transpose()?;
    let tls = match &settings.identity {
        Some((certificate, key)) => Some(tls_acceptor(certificate, key)?),
        None => None,
    };
    let listener = listen(settings.listen).await?;
    let (events, mut incoming) = mpsc::channel(EVENTS);
    let (commands, mut commanded) = mpsc::unbounded_channel();
    let pages = Pages { commands: commands.clone(), token: Token::new(token), local_only: tls.is_none() };
    let service = ClusterServer::new(Service { events, next: AtomicU64::new(1) })
        .max_decoding_message_size(MAX_MESSAGE_BYTES + 64 * 1024);
    let router = web::router(pages, Routes::new(service).into_axum_router());

    let secure = if tls.is_some() { "https" } else { "http" };
    info!("listening on {secure}://{} as pid {}", settings.listen, std::process::id());
    let server = Server { limits: Limits::of_cluster(descriptors), slots: Arc::default(), tls, http2: true };
    let server = tokio::spawn(server.run(listener, router));

    let mut hub = Hub::new(settings, commands, Now::get());
    let mut ticks = interval(engine::deadlines::TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut terminate = signal(SignalKind::terminate()).map_err(Error::system("watch for signals"))?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(Error::system("watch for signals"))?;
    loop {
        tokio::select! {
            // In this order, so that questions are answered and deadlines checked under any load of
            // messages.
            biased;
            _ = terminate.recv() => break,
            _ = interrupt.recv() => break,
            Some(command) = commanded.recv() => hub.command(command, Now::get()),
            _ = ticks.tick() => hub.tick(Now::get()),
            Some(event) = incoming.recv() => hub.stream_event(event, Now::get()),
            else => break,
        }
        if server.is_finished() {
            error!("the server ended");
            break;
        }
    }
    hub.wait_for_disk();
    info!("ended");
    Ok(())
}

async fn listen(address: SocketAddr) -> Result<TcpListener, Error> {
    let listener = TcpListener::bind(address).await;
    listener.map_err(|source| Error::Listen { address, source })
}
