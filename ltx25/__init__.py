"""The engine: LTX-2.5 from prompt to frames and sound, on one device, without the host. It never imports comfy.

| step | home |
|---|---|
| widgets or flags -> a checked wish | request.py |
| sizes: pixels, seconds, latents, tokens | shapes.py |
| files -> parts with weights on the device | checkpoint/, config/, parts.py, residency.py |
| text -> ids -> hidden states -> features | text/ |
| features -> video and audio context | connector.py |
| masks, conditions, noise -> tokens | latents.py, conditions.py |
| sigmas, and the loop over them | schedule.py, sampler.py, steps.py, denoise.py |
| the forwards of a step, and how they mix | guidance.py, predictor.py, flight.py |
| one forward: both streams through the blocks | dit/, graphs.py |
| latents -> frames, latents -> sound | video/, audio/ |
| a job, checked; what a phase needs; a way that fits | preparing.py, sizing.py, fitting.py |
| all of it in order, and what it is asked and answers | engine.py, job.py |
| what ran, how long, on what | instrument/ |
"""
