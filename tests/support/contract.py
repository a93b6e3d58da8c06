"""The node contract as data: what users' workflows hold by name and by position. Entries are only ever appended.

NODES: id -> inputs in order as (id, type, default), and outputs as (id, type). A combo's type is the tuple of its
options, or the folder under models/ that fills it. NO_DEFAULT: a link.
"""

NO_DEFAULT = object()

NODES = {
    "LoadLTX25Checkpoint": (
        [
            ("transformer", "diffusion_models", None),
            ("text_encoder", "text_encoders", None),
            ("video_vae", "vae", None),
            ("audio_vae", "vae", None),
            ("precision", ("auto", "bf16", "fp8"), "auto"),
            ("residency", ("auto", "resident", "stream"), "auto"),
            ("legs", ("auto", "batched", "sequential"), "auto"),
            ("cache", ("memory", "disk", "off"), "memory"),
        ],
        [("engine", "LTX25_ENGINE")],
    ),
    "EncodeGemmaText": ([("engine", "LTX25_ENGINE", NO_DEFAULT), ("text", "STRING", "")], [("conditioning", "CONDITIONING")]),
    "EmptyLTX25Latent": (
        [
            ("width", "INT", 768),
            ("height", "INT", 512),
            ("frames", "INT", 121),
            ("frame_rate", "FLOAT", 24.0),
            ("batch_size", "INT", 1),
        ],
        [("latent", "LATENT")],
    ),
    "LTX25Guider": (
        [
            ("engine", "LTX25_ENGINE", NO_DEFAULT),
            ("positive", "CONDITIONING", NO_DEFAULT),
            ("video_cfg", "FLOAT", 3.0),
            ("video_stg", "FLOAT", 1.0),
            ("video_modality", "FLOAT", 3.0),
            ("video_rescale", "FLOAT", 0.7),
            ("audio_cfg", "FLOAT", 7.0),
            ("audio_stg", "FLOAT", 1.0),
            ("audio_modality", "FLOAT", 3.0),
            ("audio_rescale", "FLOAT", 0.7),
            ("stg_blocks", "STRING", "28"),
            ("skip_step", "INT", 0),
            ("negative", "CONDITIONING", NO_DEFAULT),  # optional inputs are listed after the required ones
        ],
        [("guider", "GUIDER")],
    ),
    "LTX25Sampler": (
        [
            ("guider", "GUIDER", NO_DEFAULT),
            ("latent", "LATENT", NO_DEFAULT),
            ("seed", "INT", 0),
            ("schedule", ("ltx2", "distilled", "distilled_stage2"), "ltx2"),
            ("steps", "INT", 30),
            ("sampler", ("auto", "euler", "euler_ancestral"), "auto"),
            ("frame_rate", "FLOAT", 0.0),
            ("eta", "FLOAT", 1.0),
            ("profile", "BOOLEAN", False),
            ("sigmas", "SIGMAS", NO_DEFAULT),
        ],
        [("latent", "LATENT"), ("report", "STRING")],
    ),
    "DecodeVideoVAE": (
        [("engine", "LTX25_ENGINE", NO_DEFAULT), ("latent", "LATENT", NO_DEFAULT), ("tiling", ("auto", "off"), "auto")],
        [("images", "IMAGE"), ("frame_rate", "FLOAT")],
    ),
    "PlanLTX25Render": (
        [
            ("engine", "LTX25_ENGINE", NO_DEFAULT),
            ("width", "INT", 768),
            ("height", "INT", 512),
            ("seconds", "FLOAT", 5.0),
            ("frame_rate", "FLOAT", 24.0),
            ("schedule", ("ltx2", "distilled", "distilled_stage2"), "ltx2"),
            ("steps", "INT", 30),
            ("sampler", ("auto", "euler", "euler_ancestral"), "auto"),
            ("guidance", "BOOLEAN", True),
            ("batch_size", "INT", 1),
            ("time_budget", "STRING", ""),
            ("memory_budget", "STRING", ""),
        ],
        [("plan", "STRING"), ("fits", "BOOLEAN"), ("width", "INT"), ("height", "INT"), ("frames", "INT")],
    ),
    "LTX25RunReport": (
        [("record", "STRING", "last"), ("after", "*", NO_DEFAULT)],
        [("image", "IMAGE"), ("text", "STRING")],
    ),
    "DecodeAudioVAE": ([("engine", "LTX25_ENGINE", NO_DEFAULT), ("latent", "LATENT", NO_DEFAULT)], [("audio", "AUDIO")]),
}

OPTIONAL = {("LTX25Guider", "negative"), ("LTX25Sampler", "sigmas"), ("LTX25RunReport", "after")}

# The widgets in the order that a saved workflow keeps their values in; seed brings a second one with it.
WIDGETS = {
    node: [
        name
        for entry, kind, default in inputs
        if default is not NO_DEFAULT
        for name in ((entry, "control_after_generate") if entry == "seed" else (entry,))
    ]
    for node, (inputs, _) in NODES.items()
}
