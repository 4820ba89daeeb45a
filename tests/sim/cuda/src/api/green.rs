//! Green contexts. Their share of the device has no effect here.

use std::sync::Arc;

use sim_abi::{
    cuda::{ContextHandle, CuError, Device, StreamHandle},
    ffi::Out,
    handles::Handles,
};

use super::entry::driver_api;
use crate::{
    context::{Context, device},
    stream::{NON_BLOCKING, Stream},
};

/// A green context. Its handle is not the handle of a context.
struct Green(Arc<Context>);

static GREEN: Handles<Green> = Handles::new();

/// The handle of the green context with this context, 0 for none.
pub fn handle_of(context: &Arc<Context>) -> usize {
    let all = GREEN.all();
    all.iter().find(|green| Arc::ptr_eq(&green.0, context)).map_or(0, |green| Arc::as_ptr(green) as usize)
}

fn find(green: usize) -> Result<Arc<Green>, CuError> {
    GREEN.get(green).ok_or(CuError::INVALID_CONTEXT)
}

driver_api! { call:
    since 12040 fn cuGreenCtxCreate(green: Out<usize>, _resources: usize, number: Device, _flags: u32) {
        Ok(green.set(GREEN.insert(Arc::new(Green(Context::create_green(device(number)?)))))?)
    }

    since 12040 fn cuGreenCtxDestroy(green: usize) {
        let context = Arc::clone(&find(green)?.0);
        GREEN.remove(green);
        context.destroy();
        Context::release_primary(context.device, false)
    }

    since 12040 fn cuCtxFromGreenCtx(context: Out<ContextHandle>, green: usize) {
        Ok(context.set(find(green)?.0.handle())?)
    }

    since 12050 fn cuGreenCtxStreamCreate(stream: Out<StreamHandle>, green: usize, flags: u32, priority: i32) {
        if flags & NON_BLOCKING == 0 {
            return Err(CuError::INVALID_VALUE);
        }
        Ok(stream.set(Stream::create(&find(green)?.0, flags, priority))?)
    }
}
