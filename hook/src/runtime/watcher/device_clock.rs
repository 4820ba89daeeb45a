//! The clocks of the devices: when an event completed, as CLOCK_MONOTONIC.
//!
//! An anchor is an event whose time on the host's clock is known. The watcher records it on a
//! stream of its own, where it completes within microseconds, and polls it for a bounded time. The
//! time of another event is that of the anchor plus the time between both. Anchors are renewed,
//! because the two clocks drift apart, and because the driver returns the time between two events
//! as a float, which resolves a microsecond after 16 s.
//!
//! An anchor is recorded only after an operation has completed in its context. Then the device
//! makes progress, and the hook has events in the context anyway. With
//! `CUDA_DEVICE_MAX_CONNECTIONS=1` all streams share one hardware queue, and a record waits while
//! it is full. So no anchor is recorded while a thread may be waiting for a place there. A record
//! that waits anyway stops only the watcher, which the collector notices.

use std::collections::{HashMap, VecDeque};

use crate::runtime::{
    abi::{NOT_READY, SUCCESS},
    contexts,
    device::{Code, Device},
    lifecycle::exit,
    os::{clock, seccomp},
    watcher::driver::{Driver, call},
};

/// Age at which an anchor is renewed. Each renewal costs the watcher 10 to 50 us. When the host's
/// clock is slewed by 40 millionths, the times are wrong by 10 us at this age.
const RENEWAL_NS: u64 = 250_000_000;

/// Pause after an anchor that did not complete in time, and until the rate is known.
const RETRY_NS: u64 = 100_000_000;

/// How long an anchor is polled. On a device with a single hardware queue it waits for the kernels
/// before it.
const POLLED_NS: u64 = 50_000;

/// The time of an anchor is known at least this exactly, else the thread was interrupted.
const WINDOW_NS: u64 = 10_000;

/// Number of tries of one renewal. Only an interrupted one is repeated.
const TRIES: usize = 3;

/// Maximum distance of an event from the anchor.
const VALID_NS: u64 = 16_000_000_000;

/// The clocks of all contexts in which operations have completed.
#[derive(Default)]
pub(crate) struct DeviceClocks {
    contexts: HashMap<usize, DeviceClock>,
}

impl DeviceClocks {
    /// Renews the anchor of a context if it is due, unless `may_wait` says that the record may
    /// wait. Called when an operation has completed there, at `now_ns`. Returns whether the anchor
    /// is new.
    pub(crate) fn renew(
        &mut self,
        driver: &mut Driver,
        context: usize,
        now_ns: u64,
        may_wait: impl FnOnce() -> bool,
    ) -> bool {
        if !self.contexts.contains_key(&context) {
            // The driver has freed the streams and events of contexts that were destroyed.
            self.contexts.retain(|known, _| contexts::exists(*known));
        }
        let clock = self.contexts.entry(context).or_default();
        if now_ns < clock.due_ns || !seccomp::may_read_clock() || exit::wants_final_turn() || may_wait() {
            return false;
        }
        let renewed = clock.renew(driver, context);
        clock.due_ns = match renewed {
            // Without the rate, the times are wrong by more.
            Some(Ok(())) if clock.rate.is_known() => now_ns + RENEWAL_NS,
            Some(Ok(())) | None => now_ns + RETRY_NS,
            // The device or its context is beyond repair, or the driver lacks a function.
            Some(Err(_)) => {
                clock.anchor = None;
                u64::MAX
            }
        };
        renewed == Some(Ok(()))
    }

    /// When an event of a context completed that was seen complete at `seen_ns`. `None` without an
    /// anchor.
    pub(crate) fn time_of(&self, driver: &mut Driver, context: usize, event: usize, seen_ns: u64) -> Option<u64> {
        let clock = self.contexts.get(&context)?;
        let anchor = clock.anchor.filter(|anchor| seen_ns.abs_diff(anchor.host_ns) <= VALID_NS)?;
        let anchor_event = clock.events?.current;
        let since_ns = driver.call(context, call::EVENT_ELAPSED, |device| device.elapsed_ns(anchor_event, event));
        let host_ns = since_ns?.ok()?? as f64 * clock.rate.host_per_device();
        anchor.host_ns.checked_add_signed(host_ns.round() as i64)
    }
}

/// The clock of the device of one context.
#[derive(Default)]
struct DeviceClock {
    events: Option<Events>,
    anchor: Option<Reading>,
    rate: ClockRate,
    due_ns: u64,
}

/// The stream for anchors, and two events, because an event that is recorded again loses its time.
#[derive(Debug, Clone, Copy)]
struct Events {
    stream: usize,
    /// The one with the anchor.
    current: usize,
    other: usize,
}

impl Events {
    fn create(driver: &mut Driver, context: usize) -> Option<Result<Self, Code>> {
        let create = |driver: &mut Driver, what, create: fn(&Device) -> Result<usize, Code>| {
            driver.call(context, what, create).map(Result::flatten)
        };
        let stream = match create(driver, call::STREAM_CREATE, Device::create_stream)? {
            Ok(stream) => stream,
            Err(code) => return Some(Err(code)),
        };
        let mut event = || create(driver, call::EVENT_CREATE, Device::create_event);
        // If no call may be made any more, the process ends or the context is being destroyed, and
        // the stream with it.
        let (current, other) = (event()?, event()?);
        Some(current.and_then(|current| Ok(Events { stream, current, other: other? })))
    }
}

impl DeviceClock {
    /// `None` if the anchor did not complete in time, or no call may be made now.
    fn renew(&mut self, driver: &mut Driver, context: usize) -> Option<Result<(), Code>> {
        let events = match self.events {
            Some(events) => events,
            None => match Events::create(driver, context)? {
                Ok(events) => *self.events.insert(events),
                Err(code) => return Some(Err(code)),
            },
        };
        for _ in 0..TRIES {
            let (from_ns, to_ns) = match completion_of(driver, context, (events.other, events.stream))? {
                Ok(window) => window,
                Err(code) => return Some(Err(code)),
            };
            if to_ns - from_ns > WINDOW_NS {
                continue;
            }
            let host_ns = from_ns.midpoint(to_ns);
            let passed_ns = match self.anchor {
                None => 0,
                Some(_) => {
                    let elapsed = |device: &Device| device.elapsed_ns(events.current, events.other);
                    match driver.call(context, call::EVENT_ELAPSED, elapsed)? {
                        Ok(passed_ns) => passed_ns?,
                        Err(code) => return Some(Err(code)),
                    }
                }
            };
            let device_ns = self.anchor.map_or(0, |anchor| anchor.device_ns.saturating_add(passed_ns));
            let reading = Reading { host_ns, device_ns };
            self.rate.add(reading);
            self.anchor = Some(reading);
            self.events = Some(Events { current: events.other, other: events.current, ..events });
            return Some(Ok(()));
        }
        None
    }
}

/// Records an event and polls it. Returns a time before and a time after its completion.
fn completion_of(
    driver: &mut Driver,
    context: usize,
    (event, stream): (usize, usize),
) -> Option<Result<(u64, u64), Code>> {
    let mut from_ns = clock::now_ns();
    let until_ns = from_ns + POLLED_NS;
    let record = |device: &Device| device.record_event(event, stream);
    if let Err(code) = driver.call(context, call::EVENT_RECORD, record)?.flatten() {
        return Some(Err(code));
    }
    loop {
        let asked_ns = clock::now_ns();
        match driver.call(context, call::EVENT_QUERY, |device| device.query_event(event))? {
            Ok(SUCCESS) => return Some(Ok((from_ns, clock::now_ns()))),
            Ok(NOT_READY) if asked_ns < until_ns => from_ns = asked_ns,
            // The event will be recorded again.
            Ok(NOT_READY) => return None,
            Ok(code) | Err(code) => return Some(Err(code)),
        }
    }
}

/// A reading of both clocks: CLOCK_MONOTONIC, and the device's clock since the first reading.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Reading {
    host_ns: u64,
    device_ns: i64,
}

/// Number of readings that the rate is measured over.
const READINGS: usize = 16;

/// Over a shorter time, the errors of the readings are larger than those of an unknown rate.
const MEASURED_NS: u64 = 900_000_000;

/// Maximum deviation of the rate from 1. The quartzes of host and device differ by less.
const PLAUSIBLE: f64 = 1e-3;

/// The rate of the host's clock, measured with the device's clock.
#[derive(Default)]
struct ClockRate {
    readings: VecDeque<Reading>,
}

impl ClockRate {
    fn add(&mut self, reading: Reading) {
        if self.readings.len() == READINGS {
            self.readings.pop_front();
        }
        self.readings.push_back(reading);
    }

    /// Nanoseconds of the host's clock for each of the device's clock. `None` while unknown, or
    /// when one of the clocks stood still, as in a suspended machine.
    fn measured(&self) -> Option<f64> {
        let (first, last) = (self.readings.front()?, self.readings.back()?);
        let host_ns = last.host_ns.saturating_sub(first.host_ns);
        let rate = host_ns as f64 / last.device_ns.saturating_sub(first.device_ns) as f64;
        (host_ns >= MEASURED_NS && (rate - 1.0).abs() < PLAUSIBLE).then_some(rate)
    }

    fn is_known(&self) -> bool {
        self.measured().is_some()
    }

    fn host_per_device(&self) -> f64 {
        self.measured().unwrap_or(1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    /// Readings at these host times of a device clock that is this much faster.
    fn rate(host_ns: impl IntoIterator<Item = u64>, faster: f64) -> f64 {
        let mut rate = ClockRate::default();
        for host_ns in host_ns {
            rate.add(Reading { host_ns: 7 * SECOND + host_ns, device_ns: (host_ns as f64 * (1.0 + faster)) as i64 });
        }
        rate.host_per_device()
    }

    #[test]
    fn the_rate_is_measured_over_a_second_or_more() {
        assert_eq!((rate([], 0.0), rate([0], 0.0), rate([0, SECOND / 2], 1e-4)), (1.0, 1.0, 1.0));
        for faster in [-2e-4, -1e-6, 3e-5, 8e-4] {
            let rate = rate((0..40).map(|number| number * RENEWAL_NS), faster);
            assert!((rate * (1.0 + faster) - 1.0).abs() < 1e-9, "{faster}: {rate}");
        }
    }

    #[test]
    fn a_clock_that_stood_still_has_no_rate() {
        for faster in [-1.0, -0.5, 3.0] {
            assert_eq!(rate((0..5).map(|number| number * SECOND), faster), 1.0, "{faster}");
        }
    }
}
