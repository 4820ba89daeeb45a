//! Launches the kernels of communicators.

use std::sync::PoisonError;

use sim_abi::{cuda::StreamHandle, driver::HostKernels, ffi::Out, nccl::NcclError};

use crate::{
    communicator::Communicator,
    driver::{Driver, cuda, driver},
    kernel,
    task::Task,
};

impl Communicator {
    /// Launches tasks as one kernel.
    pub(crate) fn launch(&self, stream: StreamHandle, tasks: &[Task]) -> Result<(), NcclError> {
        let Some(first) = tasks.first() else { return Ok(()) };
        let driver = driver()?;
        let mut before = 0;
        cuda((driver.context_current)(Out::to(&mut before)))?;
        if before != self.context {
            cuda((driver.context_set_current)(self.context))?;
        }
        let result = self.launch_here(driver, stream, first, tasks);
        if before != self.context {
            cuda((driver.context_set_current)(before))?;
        }
        result
    }

    fn launch_here(
        &self,
        driver: &Driver,
        stream: StreamHandle,
        first: &Task,
        tasks: &[Task],
    ) -> Result<(), NcclError> {
        let mut capturing = 0;
        cuda((driver.is_capturing)(stream, Out::to(&mut capturing)))?;
        let counted = capturing == 0;
        if counted {
            self.order_after_other_streams(driver, stream)?;
            self.status().running += 1;
        }
        let mut arguments = Vec::with_capacity(kernel::HEAD_WORDS + tasks.len() * Task::WORDS);
        arguments.extend([self.number, u64::from(counted)]);
        arguments.extend(tasks.iter().flat_map(Task::encode));
        let launched = launch_kernel(&first.kernel_name(), stream, &arguments);
        if launched.is_err() && counted {
            self.finished();
        }
        launched
    }

    /// Kernels of a communicator run in the order of their launches, on any stream.
    fn order_after_other_streams(&self, driver: &Driver, stream: StreamHandle) -> Result<(), NcclError> {
        let mut order = self.order.lock().unwrap_or_else(PoisonError::into_inner);
        let last = order.0.replace(stream);
        let Some(last) = last.filter(|last| *last != stream) else { return Ok(()) };
        let event = match order.1 {
            Some(event) => event,
            None => {
                let (mut event, disable_timing) = (0, 2);
                cuda((driver.event_create)(Out::to(&mut event), disable_timing))?;
                *order.1.insert(event)
            }
        };
        let mut capturing = 0;
        // A stream that was destroyed, or is capturing, imposes no order.
        if (driver.is_capturing)(last, Out::to(&mut capturing)) == 0
            && capturing == 0
            && (driver.event_record)(event, last) == 0
        {
            cuda((driver.stream_wait_event)(stream, event, 0))?;
        }
        Ok(())
    }
}

/// Launches the kernel `name` in the thread's context.
fn launch_kernel(name: &str, stream: StreamHandle, arguments: &[u64]) -> Result<(), NcclError> {
    static KERNELS: HostKernels = HostKernels::new(kernel::run);
    KERNELS.launch(name, stream, arguments).map_err(|_| NcclError::UNHANDLED_CUDA)
}
