def weight_update_selector(args):
    return "all"
