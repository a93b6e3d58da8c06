"""The node contract as data: what users' workflows hold by name and by position. Entries are only ever appended.

NODES: id -> inputs in order as (id, type, default), and outputs as (id, type). A combo's type is the tuple of its
options, or the folder under models/ that fills it. NO_DEFAULT: a link.
"""

NO_DEFAULT = object()
SAMPLERS = ("auto", "euler", "euler_ancestral", "res_2s", "gradient_estimation", "euler_cfg_pp")
FOLDERS = {"diffusion_models", "text_encoders", "vae", "latent_upscale_models", "loras", "model_patches"}  # under models/

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
            ("rule", ("cfg", "cfg_star", "apg"), "cfg"),
            ("apg_eta", "FLOAT", 1.0),
            ("apg_norm", "FLOAT", 0.0),
            ("guidance_start", "FLOAT", 1.0),
            ("guidance_end", "FLOAT", 0.0),
            ("bins", "STRING", ""),
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
            ("sampler", SAMPLERS, "auto"),
            ("frame_rate", "FLOAT", 0.0),
            ("eta", "FLOAT", 1.0),
            ("profile", "BOOLEAN", False),
            ("sigmas", "SIGMAS", NO_DEFAULT),
            ("token_shift", "BOOLEAN", False),
            ("add_noise", "BOOLEAN", True),
        ],
        [("latent", "LATENT"), ("report", "STRING"), ("keyframes", "LATENT")],
    ),
    "DecodeVideoVAE": (
        [
            ("engine", "LTX25_ENGINE", NO_DEFAULT),
            ("latent", "LATENT", NO_DEFAULT),
            ("tiling", ("auto", "off"), "auto"),
            ("transfer", ("sdr", "ACEScct", "LogC3"), "sdr"),
        ],
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
            ("sampler", SAMPLERS, "auto"),
            ("guidance", "BOOLEAN", True),
            ("batch_size", "INT", 1),
            ("time_budget", "STRING", ""),
            ("memory_budget", "STRING", ""),
            ("two_stages", "BOOLEAN", False),
        ],
        [("plan", "STRING"), ("fits", "BOOLEAN"), ("width", "INT"), ("height", "INT"), ("frames", "INT")],
    ),
    "LTX25RunReport": (
        [("record", "STRING", "last"), ("after", "*", NO_DEFAULT)],
        [("image", "IMAGE"), ("text", "STRING")],
    ),
    "DecodeAudioVAE": ([("engine", "LTX25_ENGINE", NO_DEFAULT), ("latent", "LATENT", NO_DEFAULT)], [("audio", "AUDIO")]),
    "EncodeVideoVAE": (
        [("engine", "LTX25_ENGINE", NO_DEFAULT), ("images", "IMAGE", NO_DEFAULT), ("frame_rate", "FLOAT", 24.0), ("audio", "AUDIO", NO_DEFAULT)],
        [("latent", "LATENT")],
    ),
    "EncodeAudioVAE": ([("engine", "LTX25_ENGINE", NO_DEFAULT), ("audio", "AUDIO", NO_DEFAULT)], [("latent", "LATENT")]),
    "LTX25ImageCondition": (
        [
            ("engine", "LTX25_ENGINE", NO_DEFAULT),
            ("latent", "LATENT", NO_DEFAULT),
            ("image", "IMAGE", NO_DEFAULT),
            ("frame", "INT", 0),
            ("strength", "FLOAT", 1.0),
            ("crf", "INT", 18),
        ],
        [("latent", "LATENT")],
    ),
    "LTX25VideoCondition": (
        [
            ("engine", "LTX25_ENGINE", NO_DEFAULT),
            ("latent", "LATENT", NO_DEFAULT),
            ("images", "IMAGE", NO_DEFAULT),
            ("mode", ("guide", "reference", "keep"), "guide"),
            ("frame", "INT", 0),
            ("strength", "FLOAT", 1.0),
            ("attention", "FLOAT", 1.0),
            ("downscale", "INT", 0),
            ("temporal", "INT", 0),
        ],
        [("latent", "LATENT")],
    ),
    "LTX25AudioCondition": (
        [
            ("engine", "LTX25_ENGINE", NO_DEFAULT),
            ("latent", "LATENT", NO_DEFAULT),
            ("audio", "AUDIO", NO_DEFAULT),
            ("mode", ("soundtrack", "voice"), "soundtrack"),
            ("strength", "FLOAT", 1.0),
        ],
        [("latent", "LATENT")],
    ),
    "LTX25Retake": (
        [("latent", "LATENT", NO_DEFAULT), ("stretches", "STRING", "1-2"), ("streams", ("both", "video", "audio"), "both")],
        [("latent", "LATENT")],
    ),
    "LTX25Extend": (
        [("engine", "LTX25_ENGINE", NO_DEFAULT), ("latent", "LATENT", NO_DEFAULT), ("frames", "INT", 48), ("loop", "BOOLEAN", False)],
        [("latent", "LATENT")],
    ),
    "LTX25KeyframeSlots": (
        [
            ("engine", "LTX25_ENGINE", NO_DEFAULT),
            ("latent", "LATENT", NO_DEFAULT),
            ("count", "INT", 3),
            ("frames", "STRING", ""),
            ("keyframes", "LATENT", NO_DEFAULT),
            ("grid", ("even", "segments"), "even"),
        ],
        [("latent", "LATENT")],
    ),
    "LTX25LatentUpscale": (
        [("engine", "LTX25_ENGINE", NO_DEFAULT), ("latent", "LATENT", NO_DEFAULT), ("upscale_model", "latent_upscale_models", None)],
        [("latent", "LATENT")],
    ),
    "LTX25LoRA": (
        [("engine", "LTX25_ENGINE", NO_DEFAULT), ("lora_name", "loras", None), ("strength", "FLOAT", 1.0)],
        [("engine", "LTX25_ENGINE")],
    ),
    "LTX25LatentReference": (
        [("latent", "LATENT", NO_DEFAULT), ("reference", "LATENT", NO_DEFAULT), ("strength", "FLOAT", 1.0)],
        [("latent", "LATENT")],
    ),
    "LTX25TemporalRounds": (
        [
            ("guider", "GUIDER", NO_DEFAULT),
            ("latent", "LATENT", NO_DEFAULT),
            ("keyframes", "LATENT", NO_DEFAULT),
            ("upscale_model", "latent_upscale_models", None),
            ("rounds", "INT", 1),
            ("seed", "INT", 0),
            ("sound", "LATENT", NO_DEFAULT),
        ],
        [("latent", "LATENT"), ("report", "STRING")],
    ),
    "LTX25PredictDuration": (
        [
            ("engine", "LTX25_ENGINE", NO_DEFAULT),
            ("positive", "CONDITIONING", NO_DEFAULT),
            ("duration_head", "model_patches", None),
            ("frame_rate", "FLOAT", 24.0),
            ("min_seconds", "FLOAT", 1.0),
            ("max_seconds", "FLOAT", 20.0),
        ],
        [("frames", "INT"), ("seconds", "FLOAT")],
    ),
    "LTX25EnhancePrompt": (
        [
            ("engine", "LTX25_ENGINE", NO_DEFAULT),
            ("text", "STRING", ""),
            ("enabled", "BOOLEAN", False),
            ("model", "STRING", ""),
            ("image", "IMAGE", NO_DEFAULT),
        ],
        [("text", "STRING")],
    ),
}

# What came later is optional too, so that prompts saved before still run.
OPTIONAL = {
    ("PlanLTX25Render", "two_stages"),
    ("LTX25Guider", "negative"),
    *(("LTX25Guider", name) for name in ("rule", "apg_eta", "apg_norm", "guidance_start", "guidance_end", "bins")),
    ("LTX25Sampler", "sigmas"),
    ("LTX25Sampler", "token_shift"),
    ("LTX25Sampler", "add_noise"),
    ("DecodeVideoVAE", "transfer"),
    ("LTX25RunReport", "after"),
    ("EncodeVideoVAE", "audio"),
    ("LTX25KeyframeSlots", "keyframes"),
    ("LTX25KeyframeSlots", "grid"),
    ("LTX25TemporalRounds", "sound"),
    ("LTX25EnhancePrompt", "image"),
}

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
