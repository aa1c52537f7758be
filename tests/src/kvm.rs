//! The smallest KVM VM: vCPU threads that spin in guest code. It shows real vCPUs to the scheduler and to discovery; nothing
//! can run in it.
//!
//! The program `lab-kvm-vm` holds such VMs for a test, in a process of its own.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use kvm_bindings::{Msrs, kvm_msr_entry};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};

use self::memory::StealTimes;
use vmm_sys_util::signal::{Killable, SIGRTMIN};

/// A `jmp` to itself.
const SPIN: [u8; 2] = [0xeb, 0xfe];
/// Where a guest tells KVM to keep its steal time (`arch/x86/include/uapi/asm/kvm_para.h`); bit 0 turns it on.
const MSR_KVM_STEAL_TIME: u32 = 0x4b56_4d03;

/// What went wrong with a VM.
#[derive(Debug, thiserror::Error)]
pub enum KvmError {
    /// KVM refused.
    #[error("KVM refused to {what}: {source}; is /dev/kvm there and may this user use it?")]
    Kvm {
        /// What it was asked to do.
        what: &'static str,
        /// Its error.
        source: kvm_ioctls::Error,
    },
    /// A vCPU thread could not be started.
    #[error("can't start a vCPU thread: {0}")]
    Thread(io::Error),
    /// The handler for kicks could not be set.
    #[error("can't handle the signal that kicks vCPUs: {0}")]
    Signal(io::Error),
    /// A vCPU left the guest by itself.
    #[error("vCPU {index} stopped: {found}")]
    Stopped {
        /// The vCPU.
        index: u32,
        /// Why.
        found: String,
    },
}

/// A VM whose vCPUs spin. Dropping it ends its threads.
#[derive(Debug)]
pub struct SpinningVm {
    vm: VmFd,
    named: bool,
    steal: StealTimes,
    stop: Arc<AtomicBool>,
    vcpus: Vec<JoinHandle<Result<(), KvmError>>>,
}

impl SpinningVm {
    /// Makes a VM without vCPUs. With `named`, its vCPU threads are named as QEMU names them: `CPU 0/KVM`.
    ///
    /// # Errors
    /// When KVM refuses.
    pub fn new(named: bool) -> Result<Self, KvmError> {
        // KVM_RUN ends with EINTR when its thread gets a signal that has a handler, whatever the handler does.
        signal_hook::flag::register(SIGRTMIN(), Arc::new(AtomicBool::new(false)))
            .map_err(KvmError::Signal)?;
        let vm = Kvm::new()
            .and_then(|kvm| kvm.create_vm())
            .map_err(|source| refused("make a VM", source))?;
        memory::add_page(&vm, SPIN).map_err(|source| refused("take a page of memory", source))?;
        let steal =
            StealTimes::add_to(&vm).map_err(|source| refused("take a page of memory", source))?;
        Ok(Self {
            vm,
            named,
            steal,
            stop: Arc::default(),
            vcpus: Vec::new(),
        })
    }

    /// Adds a vCPU, which spins from now on.
    ///
    /// # Errors
    /// When KVM refuses or there are no threads left.
    pub fn add_vcpu(&mut self) -> Result<(), KvmError> {
        let index = u32::try_from(self.vcpus.len()).expect("KVM has at most some thousand vCPUs");
        let vcpu = self
            .vm
            .create_vcpu(u64::from(index))
            .map_err(|source| refused("make a vCPU", source))?;
        start_at_zero(&vcpu).map_err(|source| refused("set registers", source))?;
        if let Some(address) = StealTimes::address(index) {
            keep_steal_time(&vcpu, address)?;
        }
        let mut builder = thread::Builder::new();
        if self.named {
            builder = builder.name(format!("CPU {index}/KVM"));
        }
        let stop = Arc::clone(&self.stop);
        let thread = builder
            .spawn(move || spin(index, vcpu, &stop))
            .map_err(KvmError::Thread)?;
        self.vcpus.push(thread);
        Ok(())
    }

    /// The steal time of each vCPU in nanoseconds, as it stands in guest memory; of the first 64 vCPUs.
    #[must_use]
    pub fn steal_ns(&self) -> Vec<u64> {
        let count = u32::try_from(self.vcpus.len()).unwrap_or(u32::MAX);
        (0..count)
            .map_while(|index| self.steal.read(index))
            .collect()
    }

    /// Ends all vCPUs.
    ///
    /// # Errors
    /// When one of them had stopped by itself.
    pub fn stop(mut self) -> Result<(), KvmError> {
        self.end()
    }

    fn end(&mut self) -> Result<(), KvmError> {
        self.stop.store(true, Ordering::Relaxed);
        let mut result = Ok(());
        for vcpu in self.vcpus.drain(..) {
            // A kick that comes just before KVM_RUN is lost, so one is not enough.
            while !vcpu.is_finished() {
                // It fails only for a thread that has ended meanwhile.
                let _ = vcpu.kill(SIGRTMIN());
                thread::sleep(Duration::from_millis(5));
            }
            let ended = vcpu
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            result = result.and(ended);
        }
        result
    }
}

impl Drop for SpinningVm {
    fn drop(&mut self) {
        // Whoever wants to know calls stop().
        let _ = self.end();
    }
}

fn refused(what: &'static str, source: kvm_ioctls::Error) -> KvmError {
    KvmError::Kvm { what, source }
}

/// Real mode, first instruction at address 0.
fn start_at_zero(vcpu: &VcpuFd) -> Result<(), kvm_ioctls::Error> {
    let mut segments = vcpu.get_sregs()?;
    segments.cs.base = 0;
    segments.cs.selector = 0;
    vcpu.set_sregs(&segments)?;
    let mut registers = vcpu.get_regs()?;
    registers.rip = 0;
    // Bit 1 is always set.
    registers.rflags = 2;
    vcpu.set_regs(&registers)
}

fn keep_steal_time(vcpu: &VcpuFd, address: u64) -> Result<(), KvmError> {
    let entry = kvm_msr_entry {
        index: MSR_KVM_STEAL_TIME,
        data: address | 1,
        ..kvm_msr_entry::default()
    };
    let entries = Msrs::from_entries(&[entry]).expect("one entry is not too many");
    match vcpu.set_msrs(&entries) {
        Ok(1) => Ok(()),
        Ok(_) => Err(refused("keep the steal time", kvm_ioctls::Error::new(22))),
        Err(source) => Err(refused("keep the steal time", source)),
    }
}

fn spin(index: u32, mut vcpu: VcpuFd, stop: &AtomicBool) -> Result<(), KvmError> {
    while !stop.load(Ordering::Relaxed) {
        match vcpu.run() {
            Ok(kvm_ioctls::VcpuExit::Intr) => {}
            Ok(exit) => {
                let found = format!("{exit:?}");
                return Err(KvmError::Stopped { index, found });
            }
            Err(error) if error.errno() == rustix::io::Errno::INTR.raw_os_error() => {}
            Err(error) => {
                let found = error.to_string();
                return Err(KvmError::Stopped { index, found });
            }
        }
    }
    Ok(())
}

#[allow(
    unsafe_code,
    reason = "KVM takes guest memory by its address, which no safe interface can check"
)]
mod memory {
    use std::sync::atomic::{AtomicU64, Ordering};

    use kvm_bindings::kvm_userspace_memory_region;
    use kvm_ioctls::VmFd;

    const PAGE: usize = 4096;
    /// `struct kvm_steal_time`, whose first field is the steal time in nanoseconds.
    const STEAL_TIME: usize = 64;
    /// The guest address of the page with the steal times.
    const STEAL_PAGE: u64 = 4096;

    #[repr(C, align(4096))]
    struct Page([u8; PAGE]);

    /// Gives a VM one page of memory at address 0, which begins with `code`. The page is never freed.
    pub(super) fn add_page<const N: usize>(
        vm: &VmFd,
        code: [u8; N],
    ) -> Result<(), kvm_ioctls::Error> {
        let mut page = Box::new(Page([0; PAGE]));
        page.0[..N].copy_from_slice(&code);
        let region = kvm_userspace_memory_region {
            slot: 0,
            flags: 0,
            guest_phys_addr: 0,
            memory_size: PAGE as u64,
            userspace_addr: Box::into_raw(page) as u64,
        };
        // SAFETY: the address is that of a whole, aligned page which is never freed and which only the guest uses from here on.
        unsafe { vm.set_user_memory_region(region) }
    }

    /// The steal times that KVM writes for each vCPU.
    #[derive(Debug)]
    pub(super) struct StealTimes(&'static [AtomicU64; PAGE / 8]);

    #[repr(C, align(4096))]
    struct Shared([AtomicU64; PAGE / 8]);

    impl StealTimes {
        pub(super) fn add_to(vm: &VmFd) -> Result<Self, kvm_ioctls::Error> {
            let shared: &'static Shared =
                Box::leak(Box::new(Shared(std::array::from_fn(|_| AtomicU64::new(0)))));
            let region = kvm_userspace_memory_region {
                slot: 1,
                flags: 0,
                guest_phys_addr: STEAL_PAGE,
                memory_size: PAGE as u64,
                userspace_addr: std::ptr::from_ref(shared) as u64,
            };
            // SAFETY: the address is that of a whole, aligned page which is never freed, and which everybody here reads atomically.
            unsafe { vm.set_user_memory_region(region)? };
            Ok(Self(&shared.0))
        }

        /// Where in guest memory the steal time of a vCPU is, as long as there is room.
        pub(super) fn address(index: u32) -> Option<u64> {
            let offset = u64::from(index) * STEAL_TIME as u64;
            (offset < PAGE as u64).then_some(STEAL_PAGE + offset)
        }

        /// KVM writes it in one piece.
        pub(super) fn read(&self, index: u32) -> Option<u64> {
            let at = index as usize * STEAL_TIME / 8;
            self.0.get(at).map(|steal| steal.load(Ordering::Acquire))
        }
    }
}
