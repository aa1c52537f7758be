//! The calls of `ControlService`.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use hint_proto::v1;
use hint_proto::v1::control_service_server::ControlService;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, timeout_at};
use tokio_stream::wrappers::WatchStream;
use tokio_stream::{Stream, StreamExt};
use tonic::transport::server::UdsConnectInfo;
use tonic::{Request, Response, Status};

use super::{Command, convert};
use crate::model::{HostView, Mode, Outcome, VmView};
use crate::text::printable;
use crate::wire;

/// How long SetMode waits for the daemon and the agents.
const CONFIRMATION: Duration = Duration::from_secs(5);
/// Ids that an error message lists at most.
const LISTED: usize = 20;

/// The service.
#[derive(Debug)]
pub(super) struct Control {
    view: watch::Receiver<Arc<HostView>>,
    commands: mpsc::Sender<Command>,
}

impl Control {
    /// A service that shows `view` and passes commands on.
    pub(super) fn new(
        view: watch::Receiver<Arc<HostView>>,
        commands: mpsc::Sender<Command>,
    ) -> Self {
        Self { view, commands }
    }

    fn latest(&self) -> Arc<HostView> {
        Arc::clone(&self.view.borrow())
    }

    /// Has the daemon set the mode.
    async fn command(&self, mode: Mode, deadline: Instant) -> Result<(), Status> {
        let (done, set) = oneshot::channel();
        let command = Command::SetMode { mode, done };
        let sent = timeout_at(deadline, self.commands.send(command)).await;
        let gone = || Status::unavailable("the broker is stopping");
        let late =
            || Status::deadline_exceeded("the broker did not set the mode in 5 s: see its journal");
        sent.map_err(|_| late())?.map_err(|_| gone())?;
        timeout_at(deadline, set)
            .await
            .map_err(|_| late())?
            .map_err(|_| gone())
    }

    /// Waits until no connected agent is folded, or for `deadline`; says who of `asked` has its mask back, and who may not.
    async fn confirm(&self, asked: &HostView, deadline: Instant) -> (Vec<String>, Vec<String>) {
        let mut view = self.view.clone();
        let all_restored =
            |view: &Arc<HostView>| view.mode == Mode::Observe && !view.vms.iter().any(in_force);
        // Both ends of the wait are fine: what the view shows then is told.
        let _ = timeout_at(deadline, view.wait_for(all_restored)).await;
        let now = self.latest();
        let mut restored = Vec::new();
        let mut unconfirmed = Vec::new();
        for vm in &now.vms {
            let before = asked.vms.iter().find(|old| old.vm.id == vm.vm.id);
            let id = vm.vm.id.to_string();
            match &vm.agent {
                Some(_) if in_force(vm) => unconfirmed.push(id),
                Some(_) if before.is_some_and(hinted) => restored.push(id),
                None if before.is_some_and(in_force) => unconfirmed.push(id),
                Some(_) | None => {}
            }
        }
        (restored, unconfirmed)
    }
}

/// Does its guest avoid CPUs because of a hint? The mask that the agent had found may have avoided some too.
fn in_force(vm: &VmView) -> bool {
    vm.agent.as_ref().is_some_and(|agent| {
        let undone = matches!(agent.outcome, Some(Outcome::Restored | Outcome::Logged));
        agent.folded() && !undone
    })
}

/// Does a connected agent act on hints for it?
fn hinted(vm: &VmView) -> bool {
    in_force(vm) || (vm.agent.is_some() && vm.mode == Mode::Enforce)
}

#[tonic::async_trait]
impl ControlService for Control {
    type WatchVmsStream = Pin<Box<dyn Stream<Item = Result<v1::WatchVmsResponse, Status>> + Send>>;

    async fn list_vms(
        &self,
        _request: Request<v1::ListVmsRequest>,
    ) -> Result<Response<v1::ListVmsResponse>, Status> {
        let view = self.latest();
        Ok(Response::new(v1::ListVmsResponse {
            host: Some(convert::host(&view)),
            vms: convert::vms(&view),
        }))
    }

    async fn get_vm(
        &self,
        request: Request<v1::GetVmRequest>,
    ) -> Result<Response<v1::GetVmResponse>, Status> {
        let view = self.latest();
        let vm = find(&view, &request.get_ref().vm)?;
        Ok(Response::new(v1::GetVmResponse {
            vm: Some(convert::vm(vm)),
        }))
    }

    async fn watch_vms(
        &self,
        _request: Request<v1::WatchVmsRequest>,
    ) -> Result<Response<Self::WatchVmsStream>, Status> {
        let mut last = None;
        let changes = WatchStream::new(self.view.clone()).filter_map(move |view| {
            let state = v1::WatchVmsResponse {
                host: Some(convert::host(&view)),
                vms: convert::vms(&view),
            };
            let news = last.as_ref() != Some(&state);
            news.then(|| {
                last = Some(state.clone());
                Ok(state)
            })
        });
        Ok(Response::new(Box::pin(changes)))
    }

    async fn set_mode(
        &self,
        request: Request<v1::SetModeRequest>,
    ) -> Result<Response<v1::SetModeResponse>, Status> {
        let who = peer(&request);
        let wanted = request.get_ref().mode;
        let mode = v1::Mode::try_from(wanted)
            .ok()
            .and_then(wire::model_mode)
            .ok_or_else(|| {
                Status::invalid_argument(format!(
                    "mode: expected observe (1), advise (2) or enforce (3), found {wanted}"
                ))
            })?;
        tracing::info!(%mode, who, "mode requested");
        let deadline = Instant::now() + CONFIRMATION;
        let before = self.latest();
        self.command(mode, deadline).await?;
        let (restored, unconfirmed) = if mode == Mode::Observe {
            self.confirm(&before, deadline).await
        } else {
            (Vec::new(), Vec::new())
        };
        if !unconfirmed.is_empty() {
            tracing::warn!(
                ?unconfirmed,
                "agents have not confirmed that their mask is back"
            );
        }
        Ok(Response::new(v1::SetModeResponse {
            mode: wanted,
            restored,
            unconfirmed,
        }))
    }
}

/// The VM that has this id, else this UUID, else this name.
fn find<'a>(view: &'a HostView, wanted: &str) -> Result<&'a VmView, Status> {
    type Matches = fn(&VmView, &str) -> bool;
    let kinds: [(&str, Matches); 3] = [
        ("id", |vm, wanted| vm.vm.id.to_string() == wanted),
        ("UUID", |vm, wanted| {
            vm.vm
                .uuid
                .as_ref()
                .is_some_and(|uuid| uuid.eq_ignore_ascii_case(wanted))
        }),
        ("name", |vm, wanted| {
            !wanted.is_empty() && vm.vm.name == wanted
        }),
    ];
    let shown = printable(wanted);
    for (kind, matches) in kinds {
        let found: Vec<&VmView> = view.vms.iter().filter(|vm| matches(vm, wanted)).collect();
        match found.as_slice() {
            [] => {}
            [vm] => return Ok(vm),
            several => {
                let ids = several.iter().map(|vm| vm.vm.id.to_string());
                return Err(Status::failed_precondition(format!(
                    "several VMs have the {kind} {shown:?}: ask for one of the ids {}",
                    some_of(ids)
                )));
            }
        }
    }
    let there = view
        .vms
        .iter()
        .map(|vm| format!("{} ({})", vm.vm.id, printable(&vm.vm.name)));
    Err(Status::not_found(match view.vms.len() {
        0 => format!("no VM has the id, UUID or name {shown:?}: there are no VMs"),
        _ => format!(
            "no VM has the id, UUID or name {shown:?}: there are {}",
            some_of(there)
        ),
    }))
}

/// The first few, and how many more there are.
fn some_of(items: impl Iterator<Item = String>) -> String {
    let mut items: Vec<String> = items.collect();
    let more = items.len().saturating_sub(LISTED);
    items.truncate(LISTED);
    let listed = items.join(", ");
    if more == 0 {
        listed
    } else {
        format!("{listed} and {more} more")
    }
}

/// Who is at the other end, by the kernel's word.
fn peer<T>(request: &Request<T>) -> String {
    request
        .extensions()
        .get::<UdsConnectInfo>()
        .and_then(|info| info.peer_cred)
        .map_or_else(
            || "unknown".to_owned(),
            |cred| match cred.pid() {
                Some(pid) => format!("uid {} pid {pid}", cred.uid()),
                None => format!("uid {}", cred.uid()),
            },
        )
}
