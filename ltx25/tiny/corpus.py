"""A few captions in the manner of the prompts people write: what the tiny tokenizer learns its words from."""

CAPTIONS = (
    "A wide shot of a lighthouse on a cliff at sunset, waves breaking slowly on the rocks below. The camera moves forward over the water.",
    "A woman in a red coat walks through a quiet street in the rain and says: \"I have been waiting for you all night.\"",
    "Close-up of a cat on a wooden table. It looks into the camera, blinks, and the sound of a clock is heard in the background.",
    "An old man plays the piano in an empty hall; soft light falls through tall windows, and every note echoes from the walls.",
    "The camera follows a small boat on a river between green hills. Birds are singing, the water is calm, the air is clear.",
    "Slow motion: a drop of water falls into a glass, the surface ripples, the light changes from blue to gold.",
    "A crowded market in the morning. People are talking, a child laughs, someone is selling fruit, and music plays from a radio.",
    "A handheld shot of a dog running along the beach toward the viewer, sand flying, wind and waves loud in the microphone.",
    "A city at night seen from above, cars moving like lines of light between dark buildings, a low hum of traffic.",
    "In a kitchen, a cook cuts onions with a sharp knife, then turns to the camera and explains the next step in a warm voice.",
    "A train passes over a stone bridge in the mountains while snow is falling; the whistle sounds twice and fades away.",
    "Black and white film of a dancer turning on a stage, the shadow larger than the body, strings playing a slow melody.",
    "A robot made of copper picks up a flower, tilts its head and listens to the bees around it.",
    "Time-lapse of clouds over a desert: shadows move across the dunes, the colour of the sand goes from grey to orange.",
    "Two friends sit by a fire under the stars. One of them tells a story, the other one smiles and adds wood to the flames.",
    "A bowl of soup on a table, steam rising, shallow depth of field, the sound of rain against the window.",
)
