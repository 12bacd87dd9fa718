"""The tool of this example: a function with types and a docstring, which the policy reads nothing of but its name."""

# fmt: off
PRICES = {
    "pen": 712,
    "apple": 254, "pear": 617, "melon": 568, "loaf": 144, "lamp": 389, "chair": 948, "kettle": 629,
    "spoon": 496, "rug": 651, "candle": 605, "towel": 78, "mirror": 631, "basket": 24, "clock": 941,
    "brush": 868, "bucket": 491, "table": 276, "shelf": 575, "plate": 250, "bowl": 207, "cup": 745,
    "fork": 492, "knife": 564, "jar": 867, "bottle": 573, "hat": 498, "coat": 417, "scarf": 665, "glove": 892,
    "boot": 165, "belt": 248, "shirt": 661, "sock": 166, "ribbon": 899, "button": 959, "needle": 546,
    "hammer": 410, "saw": 770, "nail": 26, "rope": 698, "ladder": 806, "shovel": 76, "rake": 174, "hose": 787,
    "seed": 616, "pot": 54, "vase": 319, "frame": 809, "easel": 42, "canvas": 854, "pencil": 897,
    "eraser": 286, "ruler": 495, "stapler": 620, "folder": 747, "notebook": 953, "drum": 910, "flute": 407,
    "violin": 742, "guitar": 818, "whistle": 954, "kite": 448, "ball": 415, "racket": 756, "helmet": 831,
    "tent": 601, "lantern": 466, "compass": 969, "map": 148, "stove": 910, "blanket": 385, "pillow": 110,
    "curtain": 47, "carpet": 150, "broom": 517, "mop": 233, "sponge": 275, "soap": 699, "comb": 457,
    "razor": 808,
}
# fmt: on


def price(item: str) -> str:
    """Look up the price of an item.

    Args:
        item: The item, a single word.
    """
    return str(PRICES[item.strip().lower()])
